"""Times of short calls, fairly: one core, no garbage collection, the minimum of many rounds.

The variants take turns in every round, so that a machine that is busy for a while is busy for all
of them; the minimum then is what each takes when nothing disturbs it. Going on and off empties the
processor's caches, so the variants without the library begin with it too (`off`).
"""

import contextlib
import gc
import math
import os
import time

import torch

import dtensor_rules


@contextlib.contextmanager
def quiet():
    """Holds the process to one of its cores and one thread, without garbage collection."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)  # several on one core wait for each other, for milliseconds
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def off():
    """Torch alone, right after the library was on."""
    with dtensor_rules.enabled():
        pass
    yield


def interleaved(variants, *, calls, rounds, warmup=3):
    """Microseconds of this thread per call of each variant: the minimum over the rounds.

    Args:
        variants: by name: a function that makes a context manager, which is entered around the
            calls and not timed, and the function without arguments that is timed.
        calls: in a row, in each round.
        rounds: how many.
        warmup: calls before the first round, so that caches are filled.
    """
    best = dict.fromkeys(variants, math.inf)
    with quiet():
        for context, function in variants.values():
            with context():
                _calls(function, warmup)
        for _ in range(rounds):
            for name, (context, function) in variants.items():
                with context():
                    function()  # the first after a switch pays for cold processor caches
                    best[name] = min(best[name], _calls(function, calls))
    return best


def _calls(function, count):
    numbers = range(count)
    start = time.thread_time_ns()
    for _ in numbers:
        function()
    return (time.thread_time_ns() - start) / count / 1000
