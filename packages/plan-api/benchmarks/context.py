"""Attention over a cut sequence: time by method and order, share of work, and the ring's overlap.

    .nox/dev/bin/python packages/plan-api/benchmarks/context.py --json bench-results/context.json

A step is forward and backward of one causal attention, float32, on gloo ranks of one thread each.
Rounds of all cases are interleaved; times are medians over rounds of the slowest rank's. The
ring's trace goes beside the JSON, as Chrome's (chrome://tracing, ui.perfetto.dev): one process per
rank, its host and what is on its way.
"""

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plan_api.context_parallel import SequenceSharding, ring
from plan_api.context_parallel.attention import IMPLEMENTATIONS
from plan_api.context_parallel.kernels import select_kernel
from plan_api.context_parallel.order import ORDERS, AttentionCall, tile_between
from testkit import run_ranks

CASES = [(method, order) for method in IMPLEMENTATIONS for order in reversed(ORDERS)]
CASES.remove(("ulysses", "zigzag"))
BATCH, HEADS, KV_HEADS, FEATURES = 1, 8, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write the rows")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    found = run_ranks(measured, options.ranks, options.tokens, options.rounds, timeout=900)
    rows = [timed_row(case, found, options) for case in CASES]
    rows += [overlap_row(phase, found) for phase in ("forward", "backward")]
    origin = min(start for _, _, spans in found for _, start, _ in spans)
    events = [
        event for rank, (_, _, spans) in enumerate(found) for event in chrome(spans, rank, origin)
    ]
    options.json.parent.mkdir(exist_ok=True, parents=True)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    trace = options.json.with_suffix(".trace.json")
    trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    for row in rows:
        print(row)
    print(f"written: {options.json}, {trace}")


def measured(tokens, rounds):
    """On one rank: seconds of steps and of kernels alone, by case, and of the ring what it did."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    steps = {case: step_of(case, mesh, tokens) for case in CASES}
    work = {order: kernels_of(order, mesh, tokens) for order in ORDERS}
    times = {name: [] for name in (*steps, *work)}
    for number in range(rounds + 1):
        for name, step in {**steps, **work}.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number:  # the first warms up
                times[name].append(time.perf_counter() - start)
    forward, backward = phases_of(("ring", "zigzag"), mesh, tokens)
    there, back = [], []
    for _ in range(rounds):
        there.append(traced(forward))
        back.append(traced(backward))
    ranks = mesh.size()
    sent = {
        "forward": Messages.of(there, [rounds_alone(mesh, tokens, ranks - 1) for _ in there]),
        "backward": Messages.of(back, [rounds_alone(mesh, tokens, 2 * ranks - 1) for _ in back]),
    }
    return times, sent, there[-1] + back[-1]


@dataclass(frozen=True)
class Messages:
    """Of the ring on one rank, forward or backward, in seconds, medians over rounds.

    Attributes:
        alone: what they take when nothing is computed.
        on_their_way: what they take beside computing, each from its begin to its end.
        while_computing: of this, while this rank computed.
        waited_for: the rank, for them.
    """

    alone: float
    on_their_way: float
    while_computing: float
    waited_for: float

    @classmethod
    def of(cls, rounds, alone):
        """Of the spans of each round, and of what messages took alone."""
        return cls(
            statistics.median(alone),
            statistics.median(seconds_of(spans, "message") for spans in rounds),
            statistics.median(seconds_while_computing(spans) for spans in rounds),
            statistics.median(seconds_of(spans, "wait") for spans in rounds),
        )


def local_inputs(mesh, tokens):
    torch.manual_seed(0)
    heads, own = (HEADS, KV_HEADS, KV_HEADS), tokens // mesh.size()
    return [torch.randn(BATCH, n, own, FEATURES).requires_grad_() for n in heads]


def phases_of(case, mesh, tokens):
    """Forward, and backward of the last forward."""
    method, name = case
    call = AttentionCall(mesh, 0, SequenceSharding(name, mesh.size()), True, None, "attention")
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


def kernels_of(name, mesh, tokens):
    """The kernels of this rank's forward, as the ring calls them, and nothing else."""
    order, (query, key, value) = SequenceSharding(name, mesh.size()), local_inputs(mesh, tokens)
    kernel, own = select_kernel(query, None), query.shape[2]
    tiles = tiles_of(order, mesh.get_local_rank(), own)

    def work():
        with torch.no_grad():
            for tile in tiles:
                kernel.forward(query, key, value, tile)

    return work


def tiles_of(order, rank, own):
    found = [tile_between(order, rank, s, own, own, True) for s in range(order.ranks)]
    return [tile for tile in found if tile is not None]


def traced(step):
    """The spans of one step of the ring: kernels and waits of the host, and messages between."""
    spans, native = [], (ring.record_function, ring._RingExchange.__init__)

    class Span:
        def __init__(self, name):
            self.name = name.removeprefix("ring: ")

        def __enter__(self):
            self.start = time.perf_counter()

        def __exit__(self, *_):
            spans.append((self.name, self.start, time.perf_counter()))

    class Watched(threading.Thread):
        """Waits in place of the ring, which then waits for it, and sees when a message is done."""

        def __init__(self, works):
            super().__init__()
            self.works, self.began = works, time.perf_counter()
            self.start()

        def run(self):
            for work in self.works:
                work.wait()
            spans.append(("message", self.began, time.perf_counter()))

        def wait(self):
            self.join()

    def begin(self, *args):
        native[1](self, *args)
        self._works = [Watched(self._works)]

    dist.barrier()
    ring.record_function, ring._RingExchange.__init__ = Span, begin
    try:
        step()
    finally:
        ring.record_function, ring._RingExchange.__init__ = native
    return spans


def seconds_of(spans, name):
    return sum(end - start for kind, start, end in spans if kind == name)


def seconds_while_computing(spans):
    """Of messages, what they were on their way while this rank computed."""
    busy = [(start, end) for name, start, end in spans if name == "compute"]
    return sum(
        max(0.0, min(end, until) - max(start, since))
        for name, start, end in spans
        if name == "message"
        for since, until in busy
    )


def rounds_alone(mesh, tokens, messages):
    """Seconds of so many messages of the ring, when nothing is computed meanwhile."""
    call = AttentionCall(mesh, 0, SequenceSharding("zigzag", mesh.size()), True, None, "attention")
    _, key, value = local_inputs(mesh, tokens)
    block = torch.stack([key.detach(), value.detach()])
    spare = torch.empty_like(block)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(messages):
        block, spare = ring._RingExchange(block, spare, call).wait()
    return time.perf_counter() - start


def timed_row(case, found, options):
    method, name = case
    order, own = SequenceSharding(name, options.ranks), options.tokens // options.ranks
    products = [
        sum(tile.products for tile in tiles_of(order, rank, own)) for rank in range(order.ranks)
    ]
    slowest = [max(one) for one in zip(*(times[case] for times, _, _ in found), strict=True)]
    kernels = [statistics.median(times[name]) for times, _, _ in found]
    row = {"case": f"{method}, {name}", "step_ms": round(1e3 * statistics.median(slowest), 1)}
    if method != "ulysses":  # whose ranks have all of the sequence
        row["most_products"] = round(max(products) / sum(products), 3)
        row["most_kernel_time"] = round(max(kernels) / sum(kernels), 3)
    return row


def overlap_row(phase, found):
    mean = {
        field.name: statistics.mean(getattr(sent[phase], field.name) for _, sent, _ in found)
        for field in fields(Messages)
    }
    row = {f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in mean.items()}
    share = mean["while_computing"] / mean["on_their_way"]
    return (
        {"case": f"messages of the ring, zigzag, {phase}"} | row | {"overlapped": round(share, 2)}
    )


def chrome(spans, rank, origin):
    """Messages overlap each other, so each goes to the first thread that is free."""
    free, events = [0.0], []
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        thread = 0
        if name == "message":
            thread = next((at for at in range(1, len(free)) if free[at] <= start), len(free))
            free[thread : thread + 1] = [end]
        events.append({
            "name": name, "ph": "X", "pid": rank, "tid": thread,
            "ts": 1e6 * (start - origin), "dur": 1e6 * (end - start),
        })  # fmt: skip
    return events


if __name__ == "__main__":
    main()
