"""Cached dispatch on a ragged tensor beside a Shard, and redistribution beside torch's."""

import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ragged_shard import RaggedShard
from testkit import CommLog, fake_mesh, run_ranks

ROUNDS = 15
DISPATCH_ROUNDS = 200


def dispatch_rows():
    """Microseconds of this thread per call whose sharding is in torch's cache, on (8, 4)."""
    operators = {
        "mul scalar": lambda x: x * 2.0,
        "add": lambda x: x + x,
        "add_": lambda x: x.add_(x),
        "foreach_mul_ of 20": lambda x: torch._foreach_mul_([x] * 20, 2.0),
    }
    rows = []
    with fake_mesh((2,)) as mesh:
        placed = {
            name: distribute_tensor(torch.ones(8, 4), mesh, [placement], src_data_rank=None)
            for name, placement in (
                ("shard", Shard(0)),
                ("ragged", RaggedShard((0,), (1, 1))),
                ("uneven", RaggedShard((0,), (3, 5))),
            )
        }
        for name, operator in operators.items():
            times = {kind: [] for kind in placed}
            for _ in range(DISPATCH_ROUNDS):  # in turn, so that a busy machine is busy for all
                for kind, tensor in placed.items():
                    times[kind].append(_per_call(operator, tensor, 100))
            best = {kind: min(values) for kind, values in times.items()}
            rows.append(
                {
                    "case": f"dispatch {name}",
                    "shard_us": round(best["shard"], 2),
                    "ragged_us": round(best["ragged"], 2),
                    "uneven_us": round(best["uneven"], 2),
                    "ratio": round(max(best["ragged"], best["uneven"]) / best["shard"], 3),
                    "goal": 1.1,
                }
            )
    return rows


def redistribution_rows():
    """Milliseconds for 4 M float32 elements on two gloo ranks, the slower rank's."""
    rows = []
    for name, (ragged, shard, sent) in run_ranks(_redistributions, 2, timeout=300)[0].items():
        rows.append(
            {
                "case": f"redistribute {name}",
                "shard_ms": round(shard, 2),
                "ragged_ms": round(ragged, 2),
                "ratio": round(ragged / shard, 3),
                "collectives, shard": sent["native"],
                "collectives, ragged": sent["ragged"],
            }
        )
    return rows


def _redistributions():
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(2048, 2048)
    even, uneven = RaggedShard((0,), (1, 1)), RaggedShard((0,), (3, 5))
    pairs = {
        "even to replicate": ((even, Replicate()), (Shard(0), Replicate())),
        "uneven to replicate": ((uneven, Replicate()), (Shard(0), Replicate())),
        "replicate to even": ((Replicate(), even), (Replicate(), Shard(0))),
        "one dim to another": ((uneven, Shard(1)), (Shard(0), Shard(1))),
    }
    result = {}
    for name, (ragged, native) in pairs.items():
        times, sent = {}, {}
        for kind, (source, target) in (("ragged", ragged), ("native", native)):
            tensor = distribute_tensor(whole, mesh, [source], src_data_rank=None)
            samples = []
            for _ in range(ROUNDS):
                dist.barrier()
                start = time.perf_counter()
                tensor.redistribute(placements=[target])
                samples.append(time.perf_counter() - start)
            slowest = torch.tensor(statistics.median(samples))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[kind] = 1000 * slowest.item()
            with CommLog() as log:
                tensor.redistribute(placements=[target])
            sent[kind] = ", ".join(f"{n} {op}" for op, n in log.counts().items()) or "none"
        result[name] = (times["ragged"], times["native"], sent)
    return result


def _per_call(operator, tensor, count):
    operator(tensor)
    start = time.thread_time()
    for _ in range(count):
        operator(tensor)
    return (time.thread_time() - start) / count * 1e6
