"""Times steps of matrix optimizers, in turns, on the matrices of some layers of LLaMA."""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import Whole, fully_shard
from fsdp.optim.matrix.optimizer import MatrixOptimizer
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


def sharded(granularity=None):
    """Returns the layers, each sharded, with gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, shard_placement_fn=lambda param: granularity)
    fully_shard(model)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        param.grad.to_local().normal_()
    return model


def whole():
    """Returns the layers, with each matrix on one rank."""
    return sharded(Whole())


def own_run(param, values):
    """Returns this rank's elements of a parameter's full tensor, flat."""
    own = param.placements[0].interval(param.shape, dist.get_rank())
    return values.view(-1)[own.start : own.stop]


def measure(variants, rounds, first):
    """Measures each variant: times by round, bytes sent, and the work of the busiest rank."""
    torch.set_num_threads(1)
    optimizers = {name: make() for name, make in variants.items()}
    sent = {}
    for name, optimizer in optimizers.items():
        for _ in range(first):
            optimizer.step()
        with CommLog() as log:
            optimizer.step()
        sent[name] = log.wire_bytes()
    times = {name: [] for name in variants}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    busy = {n: busiest(o) for n, o in optimizers.items() if isinstance(o, MatrixOptimizer)}
    return times, sent, busy


def busiest(optimizer):
    """Returns the work of the busiest rank over an equal share."""
    busy = [0] * dist.get_world_size()
    for task in optimizer._owner_plan.tasks:
        busy[task.owner] += task.cost
    return max(busy) * len(busy) / sum(busy)


def main(variants, description, *, rounds, first=1):
    """Prints a row for each variant and number of ranks.

    Args:
        variants: functions that return an optimizer on a rank, by name; one is `NAIVE`.
        description: description of the command.
        rounds: default number of rounds.
        first: steps before the measurement.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        found = run_ranks(measure, ranks, variants, options.rounds, first, timeout=1200)
        times, busy = found[0][0], found[0][2]
        bytes_ = {name: sum(sent[name] for _, sent, _ in found) for name in variants}
        for name in variants:
            ratios = [a / b for a, b in zip(times[name], times[NAIVE], strict=True)]
            row = {
                "ranks": ranks,
                "variant": name,
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
