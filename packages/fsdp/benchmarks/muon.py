"""A step of Muon on 2 and 4 gloo ranks: ours, with owner placement, and the naive one.

    python packages/fsdp/benchmarks/muon.py [--ranks=2,4] [--rounds=5] [--json=FILE]

The naive step gathers every matrix on every rank, and each rank iterates on all of them: what
`full_tensor()` in an optimizer does. Ways take turns, step by step, in the same processes; a ratio
is the median of those of the rounds, each against the naive step of its round. Bytes are those that
all ranks send in a step, together.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import Whole, fully_shard
from fsdp.optim import Muon
from fsdp.optim.muon.newton_schulz import COEFFICIENTS, adjusted_lr, newton_schulz, work_of
from fsdp.optim.owned import visit
from testkit import CommLog, run_ranks

HIDDEN, FEED_FORWARD, LAYERS = 256, 688, 6
NAIVE = "naive"


class Layer(nn.Module):
    """The matrices of a layer of LLaMA."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.gate = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.up = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)


def sharded(whole):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, shard_placement_fn=(lambda param: Whole()) if whole else None)
    fully_shard(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_()
    return model


class Naive:
    """Torch's Muon, on what is gathered."""

    def __init__(self, params, dtype):
        self.params, self.dtype = list(params), dtype
        self.momenta = [torch.zeros_like(param) for param in self.params]

    @torch.no_grad()
    def step(self):
        for param, momentum in zip(self.params, self.momenta, strict=True):
            momentum.lerp_(param.grad, 0.05)
            update = param.grad.lerp(momentum, 0.95).to(self.dtype).full_tensor()
            result = newton_schulz(update, COEFFICIENTS, 5, 1e-7).contiguous()
            placement, rank = param.placements[0], dist.get_rank()
            own = placement.interval(param.shape, rank)
            local = param.to_local()
            local.mul_(1 - 0.02 * 0.1)
            lr = adjusted_lr(0.02, None, tuple(param.shape))
            local.view(-1).add_(result.view(-1)[own.start : own.stop], alpha=-lr)


def ours(model, kind=Muon, **options):
    return kind(model.named_parameters(), lr=0.02, **options)


class Blocking(Muon):
    """Waits for each exchange at once."""

    def step(self, closure=None):
        exchange = visit.redistribute_many
        visit.redistribute_many = lambda *args, **_: Arrived(exchange(*args))
        try:
            return super().step(closure)
        finally:
            visit.redistribute_many = exchange


class Arrived(list):
    def wait(self):
        return self


WAYS = {
    NAIVE: lambda: Naive(sharded(False).parameters(), torch.float32),
    "naive, gathered in bfloat16": lambda: Naive(sharded(False).parameters(), torch.bfloat16),
    "Muon": lambda: ours(sharded(False)),
    "Muon, buckets of 1 MB": lambda: ours(sharded(False), bucket_mb=1),
    "the same, nothing overlapped": lambda: ours(sharded(False), Blocking, bucket_mb=1),
    "Muon, Whole()": lambda: ours(sharded(True)),
}


def measure(rounds):
    torch.set_num_threads(1)
    optimizers = {name: make() for name, make in WAYS.items()}
    sent = {}
    for name, optimizer in optimizers.items():
        optimizer.step()
        with CommLog() as log:
            optimizer.step()
        sent[name] = log.wire_bytes()
    times = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    return times, sent, {n: busiest(o) for n, o in optimizers.items() if isinstance(o, Muon)}


def busiest(optimizer):
    """The work of the rank that has most of it, of an equal share."""
    busy = [0] * dist.get_world_size()
    for job in optimizer._work.jobs:
        busy[job.owner] += work_of(job.matrix.shape)
    return max(busy) * len(busy) / sum(busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        found = run_ranks(measure, ranks, options.rounds, timeout=1200)
        times, busy = found[0][0], found[0][2]
        bytes_ = {name: sum(sent[name] for _, sent, _ in found) for name in WAYS}
        for name in WAYS:
            ratios = [a / b for a, b in zip(times[name], times[NAIVE], strict=True)]
            row = {
                "ranks": ranks,
                "way": name,
                "ms": round(1e3 * min(times[name]), 1),
                "this / naive": round(statistics.median(ratios), 3),
                "MB sent": round(bytes_[name] / 1e6, 3),
                "bytes / naive's": round(bytes_[name] / bytes_[NAIVE], 3),
                "busiest rank / equal share": round(busy[name], 2) if name in busy else "",
            }
            rows.append(row)
            print(row, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
