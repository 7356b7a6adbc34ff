"""The CUDA library on the host: what nvcc compiled, linked to a runtime that has no device.

cpp/cuda_runtime_on_host.cpp checks each launch and runs the kernel as a loop. What is left for a
device to show is the arithmetic of its own units, and its generator; see test_cuda_backend.py.
"""

import ctypes
from dataclasses import dataclass

import pytest
import torch

from dist_rng import emulation
from dist_rng.cuda.backend import ReservedPosition, fill_params
from dist_rng.cuda.library import FillParams, KernelLibrary
from dist_rng.distributions import BernoulliTensor, FusedDropout, Integers, Normal, Uniform
from dist_rng.emulation.device import emulated_device
from dist_rng.philox.geometry import Geometry
from dist_rng.philox.kernel_spec import kernel_spec, prepared_probabilities
from dist_rng.philox.launches import launch_schedule
from dist_rng.regions.region import IndexRange, Region

from .cuda_cases import CASES, SIZES, fills, local_shape, name

SMALL = Geometry(2, 512)
STREAM, UNKNOWN_STREAM = 0x5EED, 0xBAD
SEED, OFFSET = 2**40 + 3, 4 * (2**31 - 9_999)
DROPOUTS = [(FusedDropout(0.1, itemsize), torch.bool) for itemsize in (2, 4, 8)]

Dim3 = ctypes.c_uint32 * 3


class OnHost(ctypes.Structure):
    """``OnHost`` of cpp/cuda_runtime_on_host.cpp: settings, and the last valid launch."""

    _fields_ = (
        ("devices", ctypes.c_int32),
        ("runs", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("launches", ctypes.c_int64),
        ("kernel", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("grid", Dim3),
        ("block", Dim3),
        ("shared_bytes", ctypes.c_size_t),
        ("launch_stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
    )


@dataclass(frozen=True)
class HostRuntime:
    """The library under test, the symbols of it and of the runtime, and the runtime's state."""

    library: KernelLibrary
    symbols: ctypes.CDLL
    state: OnHost


@pytest.fixture
def runtime(compiled_kernels):
    symbols = ctypes.CDLL(str(compiled_kernels.host_library))
    state = OnHost.in_dll(symbols, "on_host")
    state.devices, state.runs, state.stream = 2, True, STREAM
    return HostRuntime(KernelLibrary(compiled_kernels.host_library), symbols, state)


def params_of(local, region, draw, geometry, probabilities=None, position=None):
    """Returns the launches of cuda.fill."""
    spec = kernel_spec(draw, local.dtype, region.global_numel)
    schedule = launch_schedule(spec.access, region.global_numel, local.itemsize, geometry)
    position = ReservedPosition(SEED, OFFSET) if position is None else position
    return fill_params(local, region, spec, schedule, position, probabilities)


def assert_equals_the_emulator(runtime, local, region, draw, geometry=SMALL, position=None):
    """Fills ``local`` with the library, and compares it with what the emulator draws."""
    probabilities = None
    if isinstance(draw, BernoulliTensor):
        probabilities = torch.rand(local.shape, generator=torch.Generator().manual_seed(5))
    prepared = prepared_probabilities(local, draw, probabilities)
    for params in params_of(local, region, draw, geometry, prepared, position):
        runtime.library.fill(params, STREAM)
    expected, generator = torch.empty(local.shape, dtype=local.dtype), torch.Generator()
    with emulated_device(geometry) as device:
        generator.manual_seed(SEED)
        device.generators.set_offset(generator, OFFSET)
        emulation.fill(expected, region, draw, generator, probabilities=probabilities)
    assert local.equal(expected)


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


# Of further dtypes two regions, whose elements are not next to each other, are in the fast tier.
SPARSE = ("interleaved rows", "windows of columns")


@pytest.mark.parametrize(
    ("draw", "dtype", "region"),
    [
        pytest.param(
            draw,
            dtype,
            region,
            id=f"{name(draw)}-{name(dtype)}-{label}",
            marks=[pytest.mark.slow] * (dtype != torch.float32 and label not in SPARSE),
        )
        for draw, dtype in [*CASES, *DROPOUTS]
        for label, region in REGIONS.items()
    ],
)
def test_kernels_equal_the_emulator(runtime, draw, dtype, region):
    local = torch.zeros(local_shape(region), dtype=dtype)
    assert_equals_the_emulator(runtime, local, region, draw)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("draw", "dtype"),
    [
        (Uniform(), torch.float32),
        (Integers(0, 2**40), torch.int64),
        (BernoulliTensor(), torch.bool),
        DROPOUTS[0],
    ],
    ids=name,
)
def test_kernels_equal_the_emulator_of_a_large_device(runtime, draw, dtype, numel):
    local = torch.zeros(numel, dtype=dtype)
    assert_equals_the_emulator(runtime, local, Region.full((numel,)), draw, Geometry.H100)


def test_spaced_and_permuted_local_tensors(runtime):
    region = Region.full((40, 60)).select(1, IndexRange(20, 50)).with_memory_order((1, 0))
    assert_equals_the_emulator(runtime, torch.zeros(40, 90)[:, ::3], region, Normal())


def test_a_part_of_a_tensor_beyond_32_bit_indexing(runtime):
    numel = 2**29 + 999
    middle = numel // 2
    for start, stop in ((middle - 3000, middle + 3000), (numel - 100, numel)):
        region = Region.flat((numel,), start, stop)
        local = torch.zeros(stop - start)
        assert_equals_the_emulator(runtime, local, region, Uniform(), Geometry.H100)


@pytest.mark.parametrize("region", [REGIONS["whole"], REGIONS["columns"]], ids=["whole", "columns"])
@pytest.mark.parametrize("draw", [Uniform(), BernoulliTensor()], ids=name)
def test_a_captured_graph_reads_the_generator_where_it_is(runtime, draw, region):
    seed, offset = torch.tensor([SEED]), torch.tensor([OFFSET - 12])
    position = ReservedPosition(0, 0, seed.data_ptr(), offset.data_ptr(), within_graph=12)
    local = torch.zeros(region.grid_shape)
    assert_equals_the_emulator(runtime, local, region, draw, position=position)


@pytest.mark.parametrize(
    "geometry",
    [Geometry.T4, Geometry.L4, Geometry.A100, Geometry.H100, Geometry.B200],
    ids=["T4", "L4", "A100", "H100", "B200"],
)
def test_every_launch_of_the_tests_on_a_device_is_valid(runtime, geometry):
    state = runtime.state
    state.runs = False
    for fill in fills():
        local, launches = fill.empty("meta"), state.launches
        for params in params_of(local, fill.region, fill.draw, fill.geometry or geometry):
            params.device = 1
            runtime.library.fill(params, STREAM)
            assert_launch_is_as_designed(state, params)
        assert (state.launches > launches) == (fill.region.numel > 0)


def assert_launch_is_as_designed(state, params):
    assert (state.launch_stream, state.device) == (STREAM, params.device)
    assert (state.block[:], state.shared_bytes) == ([256, 1, 1], 0)
    x, y, z = state.grid
    if b"strides_kernel" in state.kernel:
        assert x * 256 == params.threads
        assert 1 <= y <= -(-params.count // params.threads)
    else:
        # As many threads as calls, or a grid that fills any device.
        calls = params.count // (4 if b"vectors_kernel" in state.kernel else 1)
        assert min(calls, 2**16 * 256) <= x * 256
        assert y == 1
    assert z == 1


def small_params(**values):
    """Returns a launch of Uniform in fp32 that writes nothing where launches do not run."""
    defaults = {"unroll": 4, "threads": 256, "stop": 1024, "count": 1024}
    return FillParams(**defaults | values)


def test_a_dtype_without_a_kernel_raises(runtime):
    with pytest.raises(RuntimeError, match=r"was not launched: invalid argument \(1\)"):
        runtime.library.fill(small_params(dtype=6), STREAM)


@pytest.mark.parametrize(
    ("values", "stream", "error"),
    [
        ({"device": 2}, STREAM, r"invalid device ordinal \(101\)"),
        ({}, UNKNOWN_STREAM, r"invalid resource handle \(400\)"),
        ({"threads": 255}, STREAM, r"invalid configuration argument \(9\)"),
        ({"threads": 2**39, "stop": 2**40, "count": 2**40}, STREAM, r"invalid configuration .*9"),
    ],
    ids=["device", "stream", "empty grid", "grid.x"],
)
def test_an_error_of_a_launch_raises_once(runtime, values, stream, error):
    runtime.state.runs = False
    launches = runtime.state.launches
    with pytest.raises(RuntimeError, match=f"CUDA kernel was not launched: {error}"):
        runtime.library.fill(small_params(**values), stream)
    assert runtime.state.launches == launches
    runtime.library.fill(small_params(), STREAM)
    assert runtime.state.launches == launches + 1


class CDim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32))


@pytest.mark.parametrize(
    ("grid", "block", "shared_bytes", "error"),
    [
        ((2**31 - 1, 65535, 65535), (256, 1, 1), 48 * 1024, 0),
        ((1, 1, 1), (4, 8, 8), 0, 0),
        ((2**31, 1, 1), (256, 1, 1), 0, 9),
        ((1, 65536, 1), (256, 1, 1), 0, 9),
        ((1, 1, 65536), (256, 1, 1), 0, 9),
        ((1, 0, 1), (256, 1, 1), 0, 9),
        ((1, 1, 1), (1025, 1, 1), 0, 9),
        ((1, 1, 1), (32, 32, 2), 0, 9),
        ((1, 1, 1), (1, 1, 65), 0, 9),
        ((1, 1, 1), (0, 1, 1), 0, 9),
        ((1, 1, 1), (257, 1, 1), 0, 1),  # __launch_bounds__
        ((1, 1, 1), (256, 1, 1), 48 * 1024 + 1, 1),
    ],
    ids=str,
)
def test_the_runtime_has_the_limits_of_a_device(runtime, grid, block, shared_bytes, error):
    runtime.state.runs = False
    runtime.library.fill(small_params(), STREAM)
    launch = runtime.symbols.cudaLaunchKernel
    launch.argtypes = (
        ctypes.c_void_p, CDim3, CDim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    )  # fmt: skip
    function = runtime.state.function
    assert launch(function, CDim3(*grid), CDim3(*block), None, shared_bytes, STREAM) == error
    assert [runtime.symbols.cudaGetLastError() for _ in range(2)] == [error, 0]
