"""What the tests on a device fill: draws, dtypes, shapes and regions.

test_cuda_backend.py fills them on a device; test_cuda_kernels.py checks all their launches, and
runs every draw and dtype on smaller shapes, without one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Distribution,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.philox.geometry import Geometry
from dist_rng.regions.region import IndexRange, Region

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
COMMON = (*FLOATS, *INTS, torch.bool)
CASES = [
    *product([Uniform(), Uniform(-0.3, 0.55)], FLOATS),
    *product([Normal(), Normal(0.3, 1.7)], FLOATS),
    *product([Exponential(), Exponential(1.3)], FLOATS),
    *product([Bernoulli(0.3)], COMMON),
    *product([BernoulliTensor()], COMMON),
    *product([AllIntegers()], COMMON),
    *product([Integers(3, 100)], (*FLOATS, *INTS, *UNSIGNED)),
    *product([Integers(-5, 2**28 - 6), Integers(-5, 2**28 - 5)], (torch.int32, torch.int64)),
    (Integers(-(2**63), 2**63 - 1), torch.int64),
    (Integers(-1000, 3000), torch.float16),
]
# The last two fill any device and need more than one call per thread, the very last unevenly.
SIZES = (1, 1000, 4 * 148 * 2048 + 1, 5_000_011)

SHARDED_SHAPE = (301, 7, 1000)

PERMUTED_DRAWS = (Uniform(), Normal(), BernoulliTensor())
PERMUTED_SHAPE, PERMUTED_ORDER = (61, 7, 1000), (2, 0, 1)

DROPOUT_SHAPES = ((8,), (1001, 3), (1002, 3), (2000, 1001), (3000, 1000))
DROPOUT_PROBABILITIES = (0.0, 0.1, 0.5)

OTHER_GEOMETRIES = (Geometry.L4, Geometry.B200, Geometry(3, 512))
OTHER_GEOMETRY_CASES = (
    (Uniform(), torch.float32),
    (Integers(0, 2**40), torch.int64),
    (Bernoulli(0.3), torch.bool),
)
OTHER_GEOMETRY_NUMEL = 3_000_001

# Beyond 32-bit offsets or indices.
LARGE = ((2**29, torch.float32), (2**29 + 1029, torch.float32), (2**31 + 4097, torch.uint8))


def name(value: object) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


def shards() -> list[Region]:
    shape = SHARDED_SHAPE
    full = Region.full(shape)
    return [
        full.select(0, IndexRange(100, 290)),
        full.select(1, IndexRange(2, 5)),
        full.select(2, IndexRange(17, 700)),
        full.select(0, IndexRange(3, 9)).select(2, IndexRange(0, 999)),
        full.select(0, *(IndexRange(start, min(start + 4, 301)) for start in range(0, 301, 8))),
        Region.flat(shape, 12345, 2_000_001),
        full.within(
            IndexRange(7, 400_000), IndexRange(400_001, 400_002), IndexRange(2_000_000, 2_107_000)
        ),
        Region.box(shape, (301, 0, 0), (0, 7, 1000)),
    ]


def permuted() -> list[Region]:
    full = Region.full(PERMUTED_SHAPE).with_memory_order(PERMUTED_ORDER)
    return [full, full.select(1, IndexRange(2, 5)), full.select(2, IndexRange(9, 500))]


def dropped_out(shape: tuple[int, ...], permuted: bool) -> list[Region]:
    order = tuple(range(len(shape)))[:: -1 if permuted else 1]
    full = Region.full(shape).with_memory_order(order)
    return [full, full.select(0, IndexRange(1, 7))]


def mixed_draws() -> Iterator[tuple[Distribution, torch.dtype, int]]:
    usual = [(draw, dtype) for draw, dtype in CASES if not isinstance(draw, BernoulliTensor)]
    for step in range(50):
        draw, dtype = usual[step * 7 % len(usual)]
        yield draw, dtype, 1000 + 27_777 * step


def parts_of_large(numel: int) -> list[Region]:
    middle = numel // 2
    ranges = ((middle - 5, middle + 5), (numel - 9, numel), (0, 3))
    return [Region.full((numel,)), *(Region.flat((numel,), *ends) for ends in ranges)]


def local_shape(region: Region) -> tuple[int, ...]:
    return (region.numel,) if region.windows is not None else region.grid_shape


@dataclass(frozen=True)
class Fill:
    """One call of ``cuda.fill``; the geometry is None where it is the device's."""

    draw: Distribution
    dtype: torch.dtype
    region: Region
    geometry: Geometry | None = None

    def empty(self, device: str) -> torch.Tensor:
        shape, order = local_shape(self.region), self.region.memory_order
        if order == tuple(range(len(order))):
            return torch.empty(shape, dtype=self.dtype, device=device)
        strides = self.region.dense_strides()
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device)


def fills() -> Iterator[Fill]:
    """Yields the calls of ``cuda.fill`` of all tests of test_cuda_backend.py."""
    for (draw, dtype), numel in product(CASES, SIZES):
        yield Fill(draw, dtype, Region.full((numel,)))
    for (draw, dtype), region in product(CASES, shards()):
        yield Fill(draw, dtype, region)
    for draw, region in product(PERMUTED_DRAWS, permuted()):
        yield Fill(draw, torch.float32, region)
    for p, dtype, shape, order in product(
        DROPOUT_PROBABILITIES, FLOATS, DROPOUT_SHAPES, (False, True)
    ):
        for region in dropped_out(shape, order):
            yield Fill(FusedDropout(p, dtype.itemsize), torch.bool, region)
    for draw, dtype, numel in mixed_draws():
        yield Fill(draw, dtype, Region.full((numel,)))
    for (draw, dtype), geometry in product(OTHER_GEOMETRY_CASES, OTHER_GEOMETRIES):
        yield Fill(draw, dtype, Region.full((OTHER_GEOMETRY_NUMEL,)), geometry)
    for numel, dtype in LARGE:
        draw = Uniform() if dtype.is_floating_point else AllIntegers()
        for region in parts_of_large(numel):
            yield Fill(draw, dtype, region)
    # The tests of the stream and of captured graphs.
    yield Fill(Uniform(), torch.float32, Region.full((5_000_000,)))
    for numel in (3, 3_000_001):
        yield Fill(Normal(), torch.float32, Region.full((numel,)))
