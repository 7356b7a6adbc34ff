"""Measures CUDA fills against torch's fill of a tensor of the local size.

    python packages/dist-rng/benchmarks/cuda_fills.py [--numel 134217728] [--json FILE]

The goal is a ratio of at most 1.2. With Shard(0) the draws of a rank are consecutive; Shard(1)
costs more, because most random calls then make one local element instead of four. Times are
measured with CUDA events over several fills; `launch_us` is the host's time per call.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dist_rng import cuda
from dist_rng.distributions import (
    Bernoulli,
    Distribution,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.regions.region import IndexRange, Region

REPEATS = 20
WORLD = 8
NUMEL = 2**27
REQUIREMENT = "expected a CUDA device and dist-rng built with nvcc"


@dataclass(frozen=True)
class Op:
    name: str
    draw: Distribution
    dtype: torch.dtype
    torch_fill: Callable[[torch.Tensor], object]


OPS = (
    Op("uniform f32", Uniform(), torch.float32, lambda t: t.uniform_()),
    Op("uniform bf16", Uniform(), torch.bfloat16, lambda t: t.uniform_()),
    Op("uniform f64", Uniform(), torch.float64, lambda t: t.uniform_()),
    Op("normal f32", Normal(), torch.float32, lambda t: t.normal_()),
    Op("normal bf16", Normal(), torch.bfloat16, lambda t: t.normal_()),
    Op("bernoulli f32", Bernoulli(0.1), torch.float32, lambda t: t.bernoulli_(0.1)),
    Op("exponential f32", Exponential(), torch.float32, lambda t: t.exponential_()),
    Op("randint i64", Integers(0, 50_000), torch.int64, lambda t: t.random_(0, 50_000)),
    # torch has no operator that only draws the mask: this one writes as many bytes.
    Op("dropout mask", FusedDropout(0.1, 2), torch.bool, lambda t: t.bernoulli_(0.1)),
)


@dataclass(frozen=True)
class Row:
    case: str
    local_numel: int
    torch_ms: float
    dist_rng_ms: float
    of_torch: float
    launch_us: float


def device_ms(run: Callable[[], object]) -> float:
    """Returns the milliseconds of one run on the device, the smallest of three averages."""
    run()
    times = []
    for _ in range(3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / REPEATS)
    return min(times)


def host_us(run: Callable[[], object]) -> float:
    """Returns the microseconds until a call returns."""
    torch.cuda.synchronize()
    start = perf_counter()
    for _ in range(REPEATS):
        run()
    seconds = perf_counter() - start
    torch.cuda.synchronize()
    return seconds / REPEATS * 1e6


def measure(op: Op, case: str, region: Region) -> Row:
    local = torch.empty(region.grid_shape, dtype=op.dtype, device="cuda")

    def fill() -> None:
        cuda.fill(local, region, op.draw)

    torch_ms, dist_rng_ms = device_ms(lambda: op.torch_fill(local)), device_ms(fill)
    return Row(
        case=f"cuda {op.name} {case}",
        local_numel=local.numel(),
        torch_ms=torch_ms,
        dist_rng_ms=dist_rng_ms,
        of_torch=dist_rng_ms / torch_ms,
        launch_us=host_us(fill),
    )


def regions(numel: int) -> dict[str, Region]:
    """Returns regions of `numel` elements; the shards are of a tensor WORLD times as large."""
    rows, columns = WORLD * numel // 8192, 8192
    matrix = Region.full((rows, columns))
    start, stop = rows // WORLD, 2 * rows // WORLD
    return {
        "whole": Region.full((numel,)),
        "Shard(0)": matrix.select(0, IndexRange(start, stop)),
        "Shard(1)": matrix.select(1, IndexRange(columns // WORLD, 2 * columns // WORLD)),
        "small": Region.full((10_000,)),
    }


def report(numel: int, only: str | None) -> list[dict[str, Any]]:
    """Measures, prints every row as it is measured, and returns all of them.

    Args:
        numel: elements of the local tensor.
        only: name of the op to measure; None for all.
    """
    measured = []
    for op in OPS:
        if only not in (None, op.name):
            continue
        for case, region in regions(numel).items():
            measured.append(asdict(measure(op, case, region)))
            cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in measured[-1].values())
            print("  ".join(cell.rjust(12) for cell in cells), flush=True)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="CUDA fills of dist-rng against torch's.")
    parser.add_argument("--numel", type=int, default=NUMEL, help="elements of the local tensor")
    parser.add_argument("--only", choices=[op.name for op in OPS], help="one op")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    if not cuda.available():
        sys.exit(f"cuda_fills.py did not run: {REQUIREMENT}")
    measured = report(options.numel, options.only)
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
