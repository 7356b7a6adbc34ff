"""Measures how much of communication `parallelize(overlap="tp")` hides behind products.

    .nox/dev/bin/python packages/plan-api/benchmarks/async_tp.py --json bench-results/async-tp.json

A step is forward and backward of a LLaMA in static mode on 2 gloo ranks of one thread each. Latency
is injected: whatever a plan communicates along ``tp`` arrives at least this long after it was sent,
split or not. So that other jobs of the machine do not matter, products cover latency by the
processor time of the rank's thread, and what they do not cover is counted, not slept: the exposed
time. Hidden is the part of the unsplit step's exposed time that the split step does not have. The
cost is the time of a split step over that of an unsplit one, without latency: of the processor,
with gloo's threads, and of the wall clock. Rounds of all cases are interleaved, and a round's time
is the slowest rank's.
"""

import argparse
import json
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plan_api import parallelize, zoo
from plan_api.ops.overlap import transfer
from plan_api.runtime import local_redistribute
from testkit import models, run_ranks

COLLECTIVES = ("_all_gather", "_reduce_scatter", "_all_reduce")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--tokens", type=int, default=512, help="of one sequence")
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--latency-ms", type=float, default=2.0, help="of each message")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    rows = []
    for sp in (True, False):
        ranks = run_ranks(measure_rank, 2, sp, options, timeout=1800)
        rows.append(row_of(sp, ranks))
        print(rows[-1], flush=True)
    if options.json is not None:
        options.json.parent.mkdir(exist_ok=True, parents=True)
        options.json.write_text(json.dumps({"options": str(options), "rows": rows}, indent=1))


def measure_rank(sp, options):
    """Returns this rank's seconds of each round by clock, overlap and latency."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    delay = Delay()
    with delay.injected():
        nets = {overlap: net_of(mesh, sp, overlap, options) for overlap in (None, "tp")}
        ids = torch.randint(0, models.VOCABULARY, (1, options.tokens))
        times = {}
        for number in range(options.rounds + 1):
            for overlap, net in nets.items():
                for seconds in (0.0, options.latency_ms / 1e3):
                    delay.seconds = seconds
                    dist.barrier()
                    clocks = {
                        "exposed": lambda: delay.waited,
                        "processor": time.process_time,
                        "wall": time.perf_counter,
                    }
                    start = {name: clock() for name, clock in clocks.items()}
                    net(input_ids=ids, labels=ids).loss.backward()
                    for name, clock in clocks.items():
                        taken = clock() - start[name]
                        if number:  # the first round warms up
                            times.setdefault((name, overlap, bool(seconds)), []).append(taken)
                    delay.seconds = 0.0
                    net.zero_grad()
    return times


def net_of(mesh, sp, overlap, options):
    net = models.llama(
        attn_implementation="sdpa", num_hidden_layers=options.layers, num_attention_heads=8,
        num_key_value_heads=8, hidden_size=options.features,
        intermediate_size=2 * options.features, max_position_embeddings=options.tokens,
    )  # fmt: skip
    plan = zoo.llama(mesh, sp=sp, loss_parallel=True)
    return parallelize(net, plan, mode="static", guard_steps=0, overlap=overlap)


class Delay:
    """Lets communication arrive at least some seconds after it was sent."""

    def __init__(self):
        self.seconds, self.waited = 0.0, 0.0

    def clock(self):
        """Returns the processor time of this thread, and the time that it waited for latency."""
        return time.thread_time() + self.waited

    @contextmanager
    def injected(self):
        """Replaces what waits for communication along an axis, inside of the block."""
        native = {name: getattr(local_redistribute, name) for name in COLLECTIVES}
        begin, wait = transfer.Transfer.__init__, transfer.Transfer.wait

        def delayed(collective):
            def call(*args, **kwargs):
                sent = self.clock()
                result = collective(*args, **kwargs)
                self.wait_until(sent)
                return result

            return call

        def begin_transfer(one, *args):
            begin(one, *args)
            one.sent = self.clock()

        def wait_for_transfer(one):
            result = wait(one)
            self.wait_until(one.sent)
            return result

        for name, collective in native.items():
            setattr(local_redistribute, name, delayed(collective))
        transfer.Transfer.__init__, transfer.Transfer.wait = begin_transfer, wait_for_transfer
        try:
            yield
        finally:
            for name, collective in native.items():
                setattr(local_redistribute, name, collective)
            transfer.Transfer.__init__, transfer.Transfer.wait = begin, wait

    def wait_until(self, sent):
        self.waited += max(0.0, sent + self.seconds - self.clock())


def row_of(sp, ranks):
    """Returns a row of the table, from the slowest rank's times of each round."""
    rounds = {
        case: [max(times) for times in zip(*(rank[case] for rank in ranks), strict=True)]
        for case in ranks[0]
    }
    exposed = [statistics.median(rounds["exposed", one, True]) for one in (None, "tp")]
    costs = {
        f"cost, {clock}, {reduce.__name__}": round(
            reduce(rounds[clock, "tp", False]) / reduce(rounds[clock, None, False]), 3
        )
        for clock in ("processor", "wall")
        for reduce in (min, statistics.median)
    }
    return {
        "plan": "sequence parallel" if sp else "no sequence parallelism",
        "step_ms": round(1e3 * min(rounds["processor", None, False]), 1),
        "exposed_ms": round(1e3 * exposed[0], 1),
        "exposed_ms, split": round(1e3 * exposed[1], 1),
        "hidden": round(1 - exposed[1] / exposed[0], 2),
        **costs,
    }


if __name__ == "__main__":
    main()
