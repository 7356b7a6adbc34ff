"""Measures CPU fills: the time of one rank of W against its share of one device's time.

    python packages/dist-rng/benchmarks/cpu_fills.py [--numel 100000000] [--json FILE]

The goal for Shard(0): a rank takes at most 1.15 x T1/W + 0.15 ns x words skipped, where T1 is one
device's time for the whole tensor and a word is one 32-bit draw. `of_goal` is the ratio,
where T1 is the smaller of torch's and this package's time. Figures are the best of several repeats
on one thread, which is also what torch's fills use.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dist_rng import cpu
from dist_rng.distributions import Bernoulli, Distribution, Exponential, Integers, Normal, Uniform
from dist_rng.regions.region import IndexRange, Region

WORLD_SIZES = (2, 8, 64)
COLUMNS = 10_000  # of the matrix
SMALL = 10_000
REPEATS = 5
NUMEL = 100_000_000
NANOSECONDS_PER_SKIPPED_WORD = 0.15


@dataclass(frozen=True)
class Op:
    name: str
    draw: Distribution
    dtype: torch.dtype
    words: int  # per element
    torch_fill: Callable[[torch.Tensor], object]


OPS = (
    Op("uniform f32", Uniform(), torch.float32, 1, lambda t: t.uniform_()),
    Op("normal f32", Normal(), torch.float32, 1, lambda t: t.normal_()),
    Op("normal bf16", Normal(), torch.bfloat16, 1, lambda t: t.normal_()),
    Op("uniform f64", Uniform(), torch.float64, 2, lambda t: t.uniform_()),
    Op("normal f64", Normal(), torch.float64, 2, lambda t: t.normal_()),
    Op("bernoulli f32", Bernoulli(0.1), torch.float32, 2, lambda t: t.bernoulli_(0.1)),
    Op("exponential f32", Exponential(), torch.float32, 2, lambda t: t.exponential_()),
    Op("randint i64", Integers(0, 50_000), torch.int64, 1, lambda t: t.random_(0, 50_000)),
)


@dataclass(frozen=True)
class Row:
    case: str
    numel: int
    rank: str
    torch_ms: float  # torch, the global tensor
    whole_ms: float  # dist-rng, the global tensor
    first_ms: float  # a rank's first call: fills the caches of layouts, checks and jumps
    rank_ms: float
    goal_ms: float
    of_goal: float


@dataclass(frozen=True)
class SmallRow:
    case: str
    numel: int
    torch_us: float
    dist_rng_us: float
    of_torch: float


@dataclass(frozen=True)
class Times:
    """Times in seconds."""

    first: float
    best: float


def measure(repeats: int, run: Callable[[], object]) -> Times:
    """Times the first run and the best of the following ones."""
    times = []
    for _ in range(repeats + 1):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return Times(first=times[0], best=min(times[1:]))


def shard(whole: Region, dim: int, rank: int, world: int) -> Region:
    size = whole.global_shape[dim]
    return whole.select(dim, IndexRange(size * rank // world, size * (rank + 1) // world))


def whole_times(op: Op, whole: Region) -> tuple[float, float]:
    """Returns the seconds for the global tensor on one device: torch's and this package's."""
    tensor, generator = torch.ones(whole.global_shape, dtype=op.dtype), torch.Generator()
    torch_time = measure(REPEATS, partial(op.torch_fill, tensor)).best
    return torch_time, measure(REPEATS, partial(cpu.fill, tensor, whole, op.draw, generator)).best


def sharded(op: Op, numel: int, worlds: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[Row]:
    shape = (numel // COLUMNS, COLUMNS)
    whole, generator = Region.full(shape), torch.Generator()
    torch_time, own_time = whole_times(op, whole)
    for dim in dims:
        for world in worlds:
            for rank in sorted({0, world // 2, world - 1}):
                region = shard(whole, dim, rank, world)
                local = torch.ones(region.grid_shape, dtype=op.dtype)
                times = measure(REPEATS, partial(cpu.fill, local, region, op.draw, generator))
                skipped = (whole.numel - region.numel) * op.words
                share = 1.15 * min(torch_time, own_time) / world
                goal = share + NANOSECONDS_PER_SKIPPED_WORD * 1e-9 * skipped
                yield Row(
                    case=f"{op.name} Shard({dim})",
                    numel=whole.numel,
                    rank=f"{rank} of {world}",
                    torch_ms=torch_time * 1e3,
                    whole_ms=own_time * 1e3,
                    first_ms=times.first * 1e3,
                    rank_ms=times.best * 1e3,
                    goal_ms=goal * 1e3,
                    of_goal=times.best / goal,
                )


def small(op: Op) -> SmallRow:
    """Measures a fill of 1e4 elements with the region of a replica: the overhead of a call."""
    tensor, region, generator = torch.zeros(SMALL), Region.full((SMALL,)), torch.Generator()
    tensor = tensor.to(op.dtype)
    native = measure(500, lambda: op.torch_fill(tensor)).best
    actual = measure(500, lambda: cpu.fill(tensor, region, op.draw, generator)).best
    return SmallRow(op.name + " small", SMALL, native * 1e6, actual * 1e6, actual / native)


def rows(numel: int, ops: tuple[Op, ...]) -> Iterator[Row | SmallRow]:
    """Yields every row as it is measured.

    Args:
        numel: elements of the global tensor of the first op; the others have a fifth of them, so
            that the benchmark takes less than a minute.
        ops: the ops to measure; the first one at all world sizes.
    """
    if not ops:
        return
    first, *others = ops
    yield small(first)
    yield from sharded(first, numel, WORLD_SIZES, dims=(0, 1))
    for op in others:
        yield small(op)
        yield from sharded(op, numel // 5, (8,), dims=(0, 1))


def report(numel: int, only: str | None) -> list[dict[str, Any]]:
    """Measures, prints every row as it is measured, and returns all of them.

    Args:
        numel: elements of the global tensor; see `rows`.
        only: name of the op to measure; None for all.
    """
    torch.set_num_threads(1)
    chosen = tuple(op for op in OPS if only in (None, op.name))
    measured = []
    for row in rows(numel, chosen):
        measured.append(asdict(row))
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in measured[-1].values())
        print("  ".join(cell.rjust(10) for cell in cells), flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU fills of dist-rng against torch's.")
    parser.add_argument("--numel", type=int, default=NUMEL)
    parser.add_argument("--only", choices=[op.name for op in OPS], help="one op")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    measured = report(options.numel, options.only)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
