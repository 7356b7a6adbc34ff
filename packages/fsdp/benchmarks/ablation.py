"""The paper's ablation on 8-bit Adam: training without the buffer, and without the planner.

    python packages/fsdp/benchmarks/ablation.py [--ranks=2,4] [--rounds=15] [--json=FILE]

Without the planner a group is cut evenly, wherever that falls, and Adam8bit moves parameters whose
blocks are cut to whole ones and back in each step; FSDP2, which cuts each parameter evenly, has
neither. All ways use the backend's own collectives, as FSDP2 does. A step is forward, backward and
Adam8bit of blocks of 2048, on gloo ranks of one thread. Ways take turns, step by step, in the same
processes. Times are of the processor, which others on the machine disturb least, of rank 0 with the
threads that send; a ratio is the median of those of the rounds. Bytes are those that all ranks send
in the optimizer's step, together.

Source: veScale-FSDP, section 6.4 and table 2, of 32 GPUs.
"""

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from copies import without_buffers
from models import batches, build

import fsdp
from fsdp import Block
from fsdp.optim import Adam8bit
from testkit import CommLog, run_ranks

MODEL, BLOCK, BASE = "LLaMA 6 M", 2048, "fsdp"


def sharded(package, granularity=None):
    options = {}
    if granularity is not None:
        options = {"shard_placement_fn": lambda param: granularity, "strategy": "native"}
    model = build(MODEL)
    for layer in model.model.layers:
        package.fully_shard(layer, **options)
    return package.fully_shard(model, **options)


def unbuffered(model):
    without_buffers(model)
    return model


WAYS = {
    BASE: lambda: sharded(fsdp, Block(BLOCK)),
    "no DBuffer": lambda: unbuffered(sharded(fsdp, Block(BLOCK))),
    "no planner": lambda: sharded(fsdp, Block(1)),
    "neither: FSDP2": lambda: sharded(torch_fsdp),
}


class Training:
    def __init__(self, way):
        self.model = WAYS[way]()
        params = self.model.named_parameters()
        self.optimizer = Adam8bit(params, lr=1e-4, block_size=BLOCK)
        self.batches = batches(MODEL, dist.get_rank(), "cpu")

    def step(self, number):
        """What the step and the optimizer's part of it took, in ms."""
        tokens = self.batches[number % len(self.batches)]
        dist.barrier()
        begin = time.process_time()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        between = time.process_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.process_time()
        return 1e3 * (end - begin), 1e3 * (end - between), loss.item()


def measure(rounds):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # blocks are cut: that is what is measured
    trainings = {way: Training(way) for way in WAYS}
    sent, times = {}, {way: [] for way in WAYS}
    for way, training in trainings.items():
        training.step(0)
        with CommLog() as log:
            training.model(
                input_ids=training.batches[1], labels=training.batches[1]
            ).loss.backward()
        rest = log.wire_bytes()
        training.optimizer.zero_grad()
        with CommLog() as log:
            training.step(1)
        sent[way] = log.wire_bytes() - rest
    for number in range(rounds):
        for way, training in trainings.items():
            times[way].append(training.step(2 + number))
    losses = {way: times[way][-1][2] for way in WAYS}
    assert max(losses.values()) - min(losses.values()) < 1e-5, losses  # FSDP2 sums in another order
    return times, sent


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        found = run_ranks(measure, ranks, options.rounds, timeout=1200)
        times = found[0][0]
        for way in WAYS:
            pairs = list(zip(times[way], times[BASE], strict=True))
            row = {
                "ranks": ranks,
                "way": way,
                "step ms": round(min(mine[0] for mine in times[way]), 1),
                "step ratio": round(statistics.median(a[0] / b[0] for a, b in pairs), 3),
                "optimizer ms": round(min(mine[1] for mine in times[way]), 2),
                "optimizer ratio": round(statistics.median(a[1] / b[1] for a, b in pairs), 2),
                "MB sent by the optimizer": round(sum(sent[way] for _, sent in found) / 1e6, 2),
            }
            rows.append(row)
            print(row, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
