"""What is allocated at the peak of a step, by cause, and what the process grows by.

Bytes are exact on a machine with other load, too. Two gloo ranks; rank 0 is shown.
"""

import argparse
import resource
import socket
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import torch.distributed as dist
from models import MODELS, batches, build
from ways import WAYS

from testkit.inspection.memory import peak_bytes

RANKS = 2
# By a part of the names of the calls around an allocation, the first that matches.
CAUSES = {
    "_to_sharded_grad": "sharded gradients",
    "collectives/all_gather.py": "unsharded parameters, and gradients in their memory",
    "gloo:": "copies of gloo",
    "reduce_scatter": "what a reduction copies or receives",
    "run_backward": "unsharded gradients, and others of backward",
}


@dataclass(frozen=True)
class Peak:
    """What rank 0 found.

    Attributes:
        growth: MB of the process's peak RSS above that before the model was made.
        page_faults: of a step, the mean.
        live: MB of tensors at the peak of a step, above what it began with.
        causes: MB of those by cause.
    """

    growth: float
    page_faults: float
    live: float
    causes: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="LLaMA 82 M")
    parser.add_argument("--ways", default="FSDP2,fsdp (native),fsdp (exchange)")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    for way in options.ways.split(","):
        with closing(socket.socket()) as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
            given = (port, way, options.model, options.steps)
            ranks = [pool.submit(_train, rank, *given) for rank in range(RANKS)]
            peak = ranks[0].result()
        print(
            f"{way}: RSS grows by {peak.growth:.0f} MB, live tensors {peak.live:.1f} MB, "
            f"{peak.page_faults:,.0f} page faults a step:"
        )
        for cause, size in peak.causes.items():
            print(f"  {size:6.1f} {cause}")


def _train(rank, port, way, name, steps):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=RANKS)
    import transformers  # noqa: F401  # before the memory is read

    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize()
    training, data = WAYS[way](build(name)), batches(name, rank, torch.device("cpu"))

    def step(number=0):
        ids = data[number % len(data)]
        training.backward(training.model(input_ids=ids, labels=ids).loss)
        training.update()

    page_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for number in range(steps):
        step(number)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    live, _ = peak_bytes(step)
    causes = _causes(step)
    dist.barrier()
    dist.destroy_process_group()
    growth = (1024 * usage.ru_maxrss - before) / 2**20
    return Peak(growth, (usage.ru_minflt - page_faults) / steps, live / 2**20, causes)


def _causes(step):
    """MB of what a step has allocated at its peak, by cause, the largest first."""
    with torch.profiler.profile(profile_memory=True, with_stack=True) as profiler:
        step()
    allocations = sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree()))
    live, now, most, worst = {}, 0, 0, {}
    for _, address, size, cause in allocations:
        if size > 0:
            live[address] = (size, cause)
            now += size
        elif address in live:
            now -= live.pop(address)[0]
        if now > most:
            most, worst = now, dict(live)
    found = Counter()
    for size, cause in worst.values():
        found[cause] += size / 2**20
    return dict(found.most_common())


def _allocations(events, calls=()):
    """Yields time, address, bytes (negative where they are freed) and cause."""
    for event in events:
        if event.name == "[memory]":
            fields, around = event.extra_fields, " > ".join(calls)
            cause = next((CAUSES[part] for part in CAUSES if part in around), "activations")
            yield event.start_time_ns, fields.ptr, fields.alloc_size, cause
        yield from _allocations(event.children, (*calls, event.name))


if __name__ == "__main__":
    main()
