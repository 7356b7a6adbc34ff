"""Gathers over two mesh axes, natively and with dtensor-rules: 2 x 2 gloo ranks."""

import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensor_rules
from testkit import run_ranks

ROUNDS = {64: 30, 1024: 30, 4096: 6}
SOURCES = [(Shard(a), Shard(b)) for a in (0, 1) for b in (0, 1)]


def rows():
    """One row for each size and placements, in milliseconds: the least of the rounds."""
    return run_ranks(_measure, 4, timeout=600)[0]


def _measure():
    mesh = init_device_mesh("cpu", (2, 2))
    return [_row(mesh, size, source) for size in ROUNDS for source in SOURCES]


def _row(mesh, size, source):
    x = distribute_tensor(torch.ones(size, size), mesh, source)
    best = {"native": float("inf"), "dtensor_rules": float("inf")}
    for _ in range(ROUNDS[size]):
        dtensor_rules.disable()
        best["native"] = min(best["native"], _seconds(x))
        with dtensor_rules.enabled():
            best["dtensor_rules"] = min(best["dtensor_rules"], _seconds(x))
    return {
        "case": f"{size} x {size}, {', '.join(f'S({placement.dim})' for placement in source)}",
        "native_ms": round(1000 * best["native"], 2),
        "dtensor_rules_ms": round(1000 * best["dtensor_rules"], 2),
    }


def _seconds(x):
    """Of the second gather: the first plans it."""
    x.redistribute(placements=[Replicate(), Replicate()])
    dist.barrier()
    start = time.perf_counter()
    x.redistribute(placements=[Replicate(), Replicate()])
    dist.barrier()
    return time.perf_counter() - start
