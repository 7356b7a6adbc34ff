"""Measures attention over a sharded sequence: times by method, order and mask, balance, overlap.

    .nox/dev/bin/python packages/plan-api/benchmarks/context.py --json bench-results/context.json

A step is forward and backward of one causal attention, float32, on gloo ranks of one thread each.
Rounds of all cases are interleaved; times are the medians over rounds of the slowest rank's. A
trace of the ring is written beside the JSON, in Chrome's format (chrome://tracing,
ui.perfetto.dev), with one process per rank, whose threads are the host and the messages in flight.
With --latency-ms each message arrives by as much later.

Masks are measured by the processor time of the ring's steps, in the order that balances their area:
the sum over all kernel calls, and all code between two of them, of the least time that each took in
any round, which other load affects little. --masks-only measures nothing else.
"""

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plan_api import AttentionMask
from plan_api.context_parallel import AttentionCall, SequenceSharding
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.context_parallel.kernels import select_kernel
from plan_api.context_parallel.kernels.cpu import CpuFlash
from plan_api.context_parallel.methods import ring
from plan_api.context_parallel.order import areas, balanced_order
from testkit import run_ranks

CASES = [(method, order) for method in IMPLEMENTATIONS for order in ("contiguous", "zigzag")]
CASES.remove(("ulysses", "zigzag"))
BATCH, HEADS, KV_HEADS, FEATURES = 1, 8, 4, 64
CAUSAL = AttentionMask(causal=True)


def masks_of(tokens):
    """Returns masks by name: of equal and of mixed documents, and of windows."""
    equal = (2048, 1024, 512, 256, 128)
    mixed = documents_of((100, 700, 250, 1500, 40), tokens)
    return {
        "causal": CAUSAL,
        **{f"documents of {length}": documents_of((length,), tokens) for length in equal},
        "documents of 40 to 1500": mixed,
        "documents of 40 to 512": documents_of((100, 300, 60, 150, 210, 512, 40), tokens),
        "window of 512": AttentionMask(causal=True, window=512),
        "window of 512 in documents of 40 to 1500": mixed & AttentionMask(window=512),
    }


def documents_of(lengths, tokens):
    """Returns the mask of documents of these lengths in turns; the last is what remains."""
    taken, rest = [], tokens
    while rest:
        taken.append(min(rest, lengths[len(taken) % len(lengths)]))
        rest -= taken[-1]
    return AttentionMask.of_lengths(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to each message")
    parser.add_argument("--masks-only", action="store_true", help="measure masks, and nothing else")
    options = parser.parse_args()
    options.json.parent.mkdir(exist_ok=True, parents=True)
    by_rank = run_ranks(measure_masks, options.ranks, options.tokens, options.rounds, timeout=1800)
    rows = [mask_row(name, by_rank, options) for name in masks_of(options.tokens)]
    if not options.masks_only:
        rows = measure_methods(options) + rows
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(row)
    print(f"written: {options.json}")


def measure_methods(options):
    """Returns the rows of methods and messages, and writes the trace."""
    arguments = options.tokens, options.rounds, 1e-3 * options.latency_ms
    ranks = run_ranks(measure_rank, options.ranks, *arguments, timeout=1800)
    rows = [timed_row(case, ranks, options) for case in CASES]
    rows += [overlap_row(phase, ranks) for phase in ("forward", "backward")]
    origin = min(span.start for measured in ranks for span in measured.spans)
    events = [
        event
        for rank, measured in enumerate(ranks)
        for event in chrome_events(measured.spans, rank, origin)
    ]
    trace = options.json.with_suffix(".trace.json")
    trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    print(f"written: {trace}")
    return rows


@dataclass(frozen=True)
class Span:
    """A kernel or a wait on the host, or a message in flight; times in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class MessageTimes:
    """The times of the ring's messages on one rank in forward or backward: medians over rounds.

    Attributes:
        alone: of the messages without computation, in seconds, as the others.
        in_flight: of the messages beside computation, summed over the messages.
        overlapped: the part of `in_flight` in which this rank computed.
        waited: of this rank's waits for messages.
    """

    alone: float
    in_flight: float
    overlapped: float
    waited: float

    @classmethod
    def of(cls, rounds, alone):
        """Computes the medians from the spans of each round, and the times without computation."""
        return cls(
            statistics.median(alone),
            statistics.median(seconds_of(spans, "message") for spans in rounds),
            statistics.median(overlapped_seconds(spans) for spans in rounds),
            statistics.median(seconds_of(spans, "wait") for spans in rounds),
        )


@dataclass(frozen=True)
class RankResult:
    """The measurements of one rank.

    Attributes:
        times: seconds of each round, by case, and of the kernels alone by order.
        messages: of the ring, by phase.
        spans: of the ring's last round, forward and backward.
    """

    times: dict[tuple[str, str] | str, list[float]]
    messages: dict[str, MessageTimes]
    spans: list[Span]


def measure_rank(tokens, rounds, latency):
    """Measures steps, kernels alone and the ring's messages on this rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps = {case: step_of(case, mesh, tokens) for case in CASES}
    kernels = {order: kernels_of(order, mesh, tokens) for order in ("contiguous", "zigzag")}
    times = {name: [] for name in (*steps, *kernels)}
    for number in range(rounds + 1):
        for name, step in {**steps, **kernels}.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - start)
    forward, backward = phases_of(("ring", "zigzag"), mesh, tokens)
    forward_spans, backward_spans = [], []
    for _ in range(rounds):
        forward_spans.append(traced(forward, latency))
        backward_spans.append(traced(backward, latency))
    ranks = mesh.size()
    messages = {
        "forward": MessageTimes.of(
            forward_spans, [seconds_alone(mesh, tokens, ranks - 1) for _ in forward_spans]
        ),
        "backward": MessageTimes.of(
            backward_spans, [seconds_alone(mesh, tokens, 2 * ranks - 2) for _ in backward_spans]
        ),
    }
    return RankResult(times, messages, forward_spans[-1] + backward_spans[-1])


def measure_masks(tokens, rounds):
    """Returns the processor times of this rank's steps, in seconds, by mask."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps = {name: masked_step(mask, mesh, tokens) for name, mask in masks_of(tokens).items()}
    least = {}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            found = processor_times(step)
            if number:  # the first round warms up
                least[name] = list(map(min, least.get(name, found), found))
    return {name: ProcessorTime(sum(found), sum(found[1::2])) for name, found in least.items()}


@dataclass(frozen=True)
class ProcessorTime:
    """Of a rank's step, in seconds.

    Attributes:
        all: of the step.
        kernels: of torch's kernels in it.
    """

    all: float
    kernels: float


def processor_times(step):
    """Returns the times before the first kernel call, of it, between it and the second, and so on.

    It is the processor time of the process, in seconds.
    """
    marks, native = [], {name: getattr(CpuFlash, name) for name in ("_forward", "_backward")}

    def timed(function):
        def call(*args):
            marks.append(time.process_time())
            result = function(*args)
            marks.append(time.process_time())
            return result

        return call

    try:
        for name, function in native.items():
            setattr(CpuFlash, name, timed(function))
        marks.append(time.process_time())
        step()
        marks.append(time.process_time())
    finally:
        for name, function in native.items():
            setattr(CpuFlash, name, function)
    return [stop - start for start, stop in pairwise(marks)]


def local_inputs(mesh, tokens):
    torch.manual_seed(0)
    heads, local_tokens = (HEADS, KV_HEADS, KV_HEADS), tokens // mesh.size()
    return [torch.randn(BATCH, n, local_tokens, FEATURES).requires_grad_() for n in heads]


def phases_of(case, mesh, tokens):
    """Returns functions that run forward, and backward of the last forward."""
    method, name = case
    order = SequenceSharding(name, mesh.size()).token_order(tokens)
    call = AttentionCall(mesh, 0, order, CAUSAL, None, "attention")
    inputs, outs = local_inputs(mesh, tokens), []

    def forward():
        outs[:] = [IMPLEMENTATIONS[method](*inputs, call)]

    def backward():
        outs[0].backward(torch.ones_like(outs[0]))

    return forward, backward


def step_of(case, mesh, tokens):
    forward, backward = phases_of(case, mesh, tokens)

    def step():
        forward()
        backward()

    return step


def masked_step(mask, mesh, tokens):
    """Returns a function that runs a step of the ring, in the order that balances a mask."""
    order = balanced_order(mask, tokens, mesh.size())
    call = AttentionCall(mesh, 0, order, mask, None, "attention")
    inputs = local_inputs(mesh, order.padded_length)
    upstream = torch.randn_like(inputs[0])

    def step():
        torch.autograd.grad(IMPLEMENTATIONS["ring"](*inputs, call), inputs, upstream)

    return step


def kernels_of(name, mesh, tokens):
    """Returns a function that runs only the kernels of this rank's forward of the ring."""
    query, key, value = local_inputs(mesh, tokens)
    kernel = select_kernel(query.unflatten(1, (KV_HEADS, -1)), None)
    rows, tiles = kernel.join(query.detach()), tiles_of(name, mesh.size(), tokens)
    divided = kernel.divide(tiles[mesh.get_local_rank()])

    def work():
        with torch.no_grad():
            for tile in divided:
                kernel.forward(rows, key, value, tile)

    return work


def tiles_of(name, ranks, tokens):
    """Returns the tiles of each rank in causal attention."""
    order = SequenceSharding(name, ranks).token_order(tokens)
    call = AttentionCall(None, 0, order, CAUSAL, None, "attention")
    return [
        [tile for source in range(ranks) for tile in call.block(rank, source).tiles]
        for rank in range(ranks)
    ]


def traced(step, latency):
    """Runs a step of the ring; returns the spans of kernels, waits and messages."""
    spans, native = [], (ring.record_function, ring._Exchange.__init__)

    class RecordSpan:
        """Replaces `record_function`."""

        def __init__(self, name):
            self.name = name.removeprefix("ring: ")

        def __enter__(self):
            self.start = time.perf_counter()

        def __exit__(self, *_):
            spans.append(Span(self.name, self.start, time.perf_counter()))

    class TimedWork(threading.Thread):
        """Waits for a message on a thread, so that its end is known; the ring waits for this."""

        def __init__(self, works):
            super().__init__()
            self.works, self.started = works, time.perf_counter()
            self.start()

        def run(self):
            for work in self.works:
                work.wait()
            time.sleep(latency)
            spans.append(Span("message", self.started, time.perf_counter()))

        def wait(self):
            self.join()

    def init_exchange(self, *args):
        native[1](self, *args)
        if self._works:
            self._works = [TimedWork(self._works)]

    dist.barrier()
    ring.record_function, ring._Exchange.__init__ = RecordSpan, init_exchange
    try:
        step()
    finally:
        ring.record_function, ring._Exchange.__init__ = native
    return spans


def seconds_of(spans, name):
    return sum(span.end - span.start for span in spans if span.name == name)


def overlapped_seconds(spans):
    """Returns the time for which messages were in flight while this rank computed."""
    return sum(
        max(0.0, min(message.end, kernel.end) - max(message.start, kernel.start))
        for message in spans
        if message.name == "message"
        for kernel in spans
        if kernel.name == "compute"
    )


def seconds_alone(mesh, tokens, messages):
    """Returns the time of this many messages of the ring without computation."""
    order = SequenceSharding("zigzag", mesh.size()).token_order(tokens)
    call = AttentionCall(mesh, 0, order, CAUSAL, None, "attention")
    _, key, value = local_inputs(mesh, tokens)
    block = torch.cat([key.detach(), value.detach()], -1)
    spare, rank, ranks = torch.empty_like(block), mesh.get_local_rank(), mesh.size()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(messages):
        ring._Exchange(block, (rank + 1) % ranks, spare, (rank - 1) % ranks, call).wait()
    return time.perf_counter() - start


def timed_row(case, ranks, options):
    method, name = case
    products = [
        sum(tile.products for tile in tiles)
        for tiles in tiles_of(name, options.ranks, options.tokens)
    ]
    rounds = zip(*(measured.times[case] for measured in ranks), strict=True)
    slowest = [max(times) for times in rounds]
    kernels = [statistics.median(measured.times[name]) for measured in ranks]
    row = {"case": f"{method}, {name}", "step_ms": round(1e3 * statistics.median(slowest), 1)}
    if method != "ulysses":  # whose ranks have the full sequence
        row["most_products"] = round(max(products) / sum(products), 3)
        row["most_kernel_time"] = round(max(kernels) / sum(kernels), 3)
    return row


def mask_row(name, times, options):
    """Compares a mask's processor time and area with causal attention's, and ranks' with means."""
    mask, count = masks_of(options.tokens)[name], len(times)
    by_rank = areas(mask, balanced_order(mask, options.tokens, count))
    cost, kernels, causal = (
        [getattr(rank[one], field) for rank in times]
        for one, field in ((name, "all"), (name, "kernels"), ("causal", "all"))
    )
    area = sum(by_rank) / CAUSAL.area(options.tokens)
    return {
        "case": f"ring, {name}",
        "processor_ms": round(1e3 * sum(cost), 1),
        "ns_per_pair": round(1e9 * sum(cost) / sum(by_rank), 1),
        "area_of_causal": round(area, 3),
        "cost_of_causal": round(sum(cost) / sum(causal), 3),
        "cost_per_area": round(sum(cost) / sum(causal) / area, 3),
        "kernels_per_area": round(sum(kernels) / sum(causal) / area, 3),
        "busiest_area_over_mean": round(max(by_rank) * count / sum(by_rank), 3),
        "busiest_time_over_mean": round(max(cost) * count / sum(cost), 3),
    }


def overlap_row(phase, ranks):
    mean = {
        field.name: statistics.mean(
            getattr(measured.messages[phase], field.name) for measured in ranks
        )
        for field in fields(MessageTimes)
    }
    row = {f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in mean.items()}
    hidden = 1 - mean["waited"] / mean["in_flight"]
    shares = {
        "overlapped": round(mean["overlapped"] / mean["in_flight"], 2), "hidden": round(hidden, 2)
    }  # fmt: skip
    return {"case": f"messages of the ring, zigzag, {phase}"} | row | shares


def chrome_events(spans, rank, origin):
    """Returns the events; messages overlap each other, so each is on the first free thread."""
    free_from, events = [0.0], []
    for span in sorted(spans, key=lambda span: span.start):
        thread = 0
        if span.name == "message":
            free = (n for n in range(1, len(free_from)) if free_from[n] <= span.start)
            thread = next(free, len(free_from))
            free_from[thread : thread + 1] = [span.end]
        events.append({
            "name": span.name, "ph": "X", "pid": rank, "tid": thread,
            "ts": 1e6 * (span.start - origin), "dur": 1e6 * (span.end - span.start),
        })  # fmt: skip
    return events


if __name__ == "__main__":
    main()
