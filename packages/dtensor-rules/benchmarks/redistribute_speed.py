"""What a redistribution of a local tensor costs in Python, torch's and ours, on a fake group of 8.

Nothing is sent and the tensors are small, so what is left is the planning, the calls and the
allocations. Figures are microseconds of this thread, the least of some repeats taken in turn.
Goal: at most 2.5 for one collective.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from dtensor_rules.redistribution import plan_redistribution
from testkit import fake_mesh

RANKS = 8
SHAPE = (16, 16)
REPEATS = 40
CALLS = 200
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PAIRS: dict[str, tuple[Placement, Placement]] = {
    "R to S(0)": (R, S0),
    "S(0) to R": (S0, R),
    "P to R": (P, R),
    "P to S(0)": (P, S0),
    "S(0) to S(1)": (S0, S1),
    "R to S(1)": (R, S1),
    "S(1) to R": (S1, R),
    "P to S(1)": (P, S1),
    "S(1) to S(0)": (S1, S0),
    "R to P": (R, P),
}


@dataclass(frozen=True)
class SpeedRow:
    """One redistribution; times in microseconds."""

    name: str
    stock_us: float
    ours_us: float
    ratio: float


def measure() -> list[SpeedRow]:
    """A row for each pair of placements, in the order of `PAIRS`."""
    with fake_mesh((RANKS,)) as mesh, torch.no_grad(), _quiet_thread():
        rows = []
        for name, (source, target) in PAIRS.items():
            whole = torch.randn(SHAPE)
            meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
            src, dst = (DTensorSpec(mesh, (placement,), meta) for placement in (source, target))
            dim = source.dim if isinstance(source, Shard) else None
            local = whole if dim is None else whole.chunk(RANKS, dim)[0].contiguous()
            plan = plan_redistribution(src, dst)
            assert plan is not None
            stock_us, ours_us = _least(
                lambda s=src, d=dst, t=local: redistribute_local_tensor(t, s, d),
                lambda p=plan, t=local: p.apply(t),
            )
            rows.append(SpeedRow(name, stock_us, ours_us, stock_us / ours_us))
        return rows


def _least(*functions: Callable[[], object]) -> list[float]:
    """Microseconds a call of each, the least of the repeats."""
    least = [float("inf")] * len(functions)
    for _ in range(REPEATS):
        for index, function in enumerate(functions):
            start = time.thread_time()
            for _ in range(CALLS):
                function()
            least[index] = min(least[index], (time.thread_time() - start) / CALLS * 1e6)
    return least


@contextmanager
def _quiet_thread() -> Iterator[None]:
    """One pinned thread without garbage collection."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(cores)})
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


if __name__ == "__main__":
    print(f"{'redistribution':14}  stock us  ours us  ratio")
    for row in measure():
        print(f"{row.name:14}  {row.stock_us:8.1f}  {row.ours_us:7.2f}  {row.ratio:5.1f}")
