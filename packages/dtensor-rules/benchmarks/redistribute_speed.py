"""What redistributions, and DTensor's methods, cost on a fake group of 8: torch's and ours.

Nothing is sent and the tensors are small, so what is left is the planning, the calls and the
allocations. Figures are microseconds of this thread, the least of some repeats taken in turn.
Goals: at most 2.5 for one collective, 5 for `DTensor.redistribute`. The fake group's all_gather and
reduce_scatter copy every piece, which is most of what is left of theirs.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor

import dtensor_rules
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


def measure_methods() -> list[SpeedRow]:
    """A row for each public method, without and with gradients."""
    with fake_mesh((RANKS,)) as mesh, _quiet_thread():
        whole = torch.randn(SHAPE)
        leaf = whole.clone().requires_grad_()
        calls: dict[str, Callable[[], object]] = {}
        for name, (source, target) in PAIRS.items():
            if target != P:
                placed = _placed(mesh, source)
                calls[f"redistribute {name}"] = lambda d=placed, t=target: d.redistribute(
                    placements=[t]
                )
        placed, with_grad = _placed(mesh, S0), _placed(mesh, S0, requires_grad=True)
        shards = [S0]
        calls["from_local"] = lambda: DTensor.from_local(whole, mesh, shards)
        calls["to_local"] = lambda: placed.to_local()
        calls["from_local, grad"] = lambda: DTensor.from_local(leaf, mesh, shards)
        calls["to_local, grad"] = lambda: with_grad.to_local()
        calls["redistribute S(0) to R, grad"] = lambda: with_grad.redistribute(placements=[R])

        def there_and_back() -> None:
            out = DTensor.from_local(leaf, mesh, shards).redistribute(placements=[R]).to_local()
            torch.autograd.grad(out, leaf, whole_grad)

        whole_grad = torch.ones(SHAPE[0] * RANKS, SHAPE[1])
        calls["all three and backward"] = there_and_back
        (stock,) = zip(*[_least(call) for call in calls.values()], strict=True)
        with dtensor_rules.enabled():
            (ours,) = zip(*[_least(call) for call in calls.values()], strict=True)
        return [
            SpeedRow(name, torchs, us, torchs / us)
            for name, torchs, us in zip(calls, stock, ours, strict=True)
        ]


def _placed(mesh: DeviceMesh, placement: Placement, *, requires_grad: bool = False) -> DTensor:
    whole = torch.randn(SHAPE)
    local = whole.chunk(RANKS, placement.dim)[0] if isinstance(placement, Shard) else whole
    return DTensor.from_local(local.contiguous().requires_grad_(requires_grad), mesh, [placement])


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
    print(f"{'redistribution':28}  stock us  ours us  ratio")
    for row in (*measure(), *measure_methods()):
        print(f"{row.name:28}  {row.stock_us:8.1f}  {row.ours_us:7.2f}  {row.ratio:5.1f}")
