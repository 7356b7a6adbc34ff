"""Runs the source of the CUDA kernels on the host: a launch is a loop over blocks and threads.

What is left for a device to show is the arithmetic of its own units, and its generator; see
test_cuda.py.
"""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from dist_rng import emulation
from dist_rng.cuda.backend import ReservedPosition, fill_params
from dist_rng.cuda.library import KernelLibrary
from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Exponential,
    FusedDropout,
    Integers,
    Normal,
    Uniform,
)
from dist_rng.emulation.device import emulated_device
from dist_rng.philox.geometry import Geometry
from dist_rng.philox.kernel_spec import kernel_spec, prepared_probabilities
from dist_rng.philox.launches import launch_schedule
from dist_rng.regions.region import IndexRange, Region

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("c++")
SMALL = Geometry(2, 512)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMMON = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
CASES = [
    *product([Uniform(-0.3, 0.55), Normal(0.3, 1.7), Exponential(1.3)], FLOATS),
    *product([Bernoulli(0.3), BernoulliTensor(), AllIntegers()], COMMON),
    *product([Integers(3, 100)], (torch.uint16, torch.uint32, torch.uint64, torch.int8)),
    (Integers(-5, 2**28 - 5), torch.int32),
    (Integers(-(2**63), 2**63 - 1), torch.int64),
    *((FusedDropout(0.1, itemsize), torch.bool) for itemsize in (2, 4, 8)),
]


def name(value):
    return str(value).removeprefix("torch.").replace(" ", "")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    source = HERE.parent / "src" / "cuda"
    if COMPILER is None or not source.is_dir():
        pytest.skip("needs g++ and the package's source")
    built = tmp_path_factory.mktemp("cuda_on_host") / "kernels.so"
    subprocess.run(
        [
            COMPILER, "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas",
            "-ffp-contract=off", "-fPIC", "-shared", "-DDIST_RNG_ISA=on_host",
            f'-DDIST_RNG_CUDA_ON_HOST="{HERE / "cpp" / "cuda_on_host.h"}"',
            "-x", "c++", *sorted(str(path) for path in source.glob("*.cu")), "-o", str(built),
        ],
        check=True,
    )  # fmt: skip
    return KernelLibrary(built)


def fill(library, local, region, draw, probabilities, seed, offset, geometry=SMALL):
    """Does what cuda.fill does, without a device."""
    spec = kernel_spec(draw, local.dtype, region.global_numel)
    prepared = prepared_probabilities(local, draw, probabilities)
    schedule = launch_schedule(spec.access, region.global_numel, local.itemsize, geometry)
    position = ReservedPosition(seed, offset)
    for params in fill_params(local, region, spec, schedule, position, prepared):
        library.fill(params, 0)


def emulated(local, region, draw, probabilities, seed, offset, geometry=SMALL):
    generator = torch.Generator().manual_seed(seed)
    with emulated_device(geometry) as device:
        device.generators.set_offset(generator, offset)
        emulation.fill(local, region, draw, generator, probabilities=probabilities)


REGIONS = {
    "whole": Region.full((70, 90)),
    "rows": Region.full((70, 90)).select(0, IndexRange(10, 60)),
    "columns": Region.full((70, 90)).select(1, IndexRange(13, 57)),
    "one row": Region.full((70, 90)).select(0, IndexRange(69, 70)),
    "interleaved rows": Region.full((70, 90)).select(
        0, *(IndexRange(start, min(start + 4, 70)) for start in range(0, 70, 8))
    ),
    "flat": Region.flat((70, 90), 1001, 6203),
    "windows": Region.full((70, 90)).within(
        IndexRange(5, 900), IndexRange(1000, 1001), IndexRange(4000, 6000)
    ),
    "windows of columns": Region.full((70, 90))
    .select(1, IndexRange(13, 57))
    .within(IndexRange(7, 1900), IndexRange(2500, 3000)),
    "box of 4 dims": Region.box((9, 10, 7, 10), (1, 2, 0, 3), (5, 6, 7, 4)),
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_kernels_equal_the_emulator(library, draw, dtype, region):
    shape = (region.numel,) if region.windows is not None else region.grid_shape
    expected = torch.empty(shape, dtype=dtype)
    given = None
    if isinstance(draw, BernoulliTensor):
        given = torch.rand(shape, generator=torch.Generator().manual_seed(5))
    seed, offset = 2**40 + 3, 4 * (2**31 - 9)
    emulated(expected, region, draw, given, seed, offset)
    local = torch.zeros(shape, dtype=dtype)
    fill(library, local, region, draw, given, seed, offset)
    assert local.equal(expected)


def test_spaced_and_permuted_local_tensors(library):
    region = Region.full((40, 60)).select(1, IndexRange(20, 50)).with_memory_order((1, 0))
    expected, local = torch.empty(40, 30), torch.zeros(40, 90)[:, ::3]
    emulated(expected, region, Normal(), None, 1, 8)
    fill(library, local, region, Normal(), None, 1, 8)
    assert local.equal(expected)


def test_a_part_of_a_tensor_beyond_32_bit_indexing(library):
    numel, geometry = 2**29 + 999, Geometry.H100
    middle = numel // 2
    for start, stop in ((middle - 3000, middle + 3000), (numel - 100, numel)):
        region = Region.flat((numel,), start, stop)
        expected, local = torch.empty(stop - start), torch.zeros(stop - start)
        emulated(expected, region, Uniform(), None, 1, 8, geometry)
        fill(library, local, region, Uniform(), None, 1, 8, geometry)
        assert local.equal(expected)


def test_a_dtype_without_a_kernel_raises(library):
    region, local = Region.full((4,)), torch.zeros(4)
    spec = kernel_spec(Uniform(), torch.float32, 4)
    schedule = launch_schedule(spec.access, 4, 4, SMALL)
    (params,) = fill_params(local, region, spec, schedule, ReservedPosition(0, 0), None)
    params.dtype = 6
    with pytest.raises(RuntimeError, match="was not launched: invalid value"):
        library.fill(params, 0)
