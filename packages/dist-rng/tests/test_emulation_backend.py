"""A GPU's numbers on CPU tensors, against exact arithmetic, recorded output of GPUs, and shards."""

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_rng import _core, emulation
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
from dist_rng.emulation.device import active_device, emulated_device
from dist_rng.philox.geometry import Geometry
from dist_rng.philox.kernel_spec import PhiloxKind, kernel_spec
from dist_rng.philox.launches import launch_schedule
from dist_rng.philox.reference import value_of, words
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import IndexRange, Region

SMALL = Geometry(2, 512)  # 1024 threads: a few thousand elements use every lane of several calls
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMMON = (*FLOATS, *INTS, torch.bool)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
CASES = [
    *product([Uniform(), Uniform(-0.3, 0.55), Uniform(1.0, 1.0)], FLOATS),
    *product([Normal(), Normal(0.3, 1.7)], FLOATS),
    *product([Exponential(), Exponential(1.3)], FLOATS),
    *product([Bernoulli(0.3), Bernoulli(1.0)], COMMON),
    *product([BernoulliTensor()], COMMON),
    *product([AllIntegers()], COMMON),
    *product([Integers(3, 100), Integers(0, 1)], (*FLOATS, *INTS, *UNSIGNED)),
    *product([Integers(-5, 2**28 - 5), Integers(-(2**31), 2**31)], (torch.int32, torch.int64)),
    (Integers(-(2**63), 2**63 - 1), torch.int64),
    (Integers(0, 2), torch.bool),
    (Integers(-1000, 3000), torch.float16),
    *((FusedDropout(0.1, itemsize), torch.bool) for itemsize in (2, 4, 8)),
]


def name(value):
    return str(value).removeprefix("torch.").replace(" ", "")


def probabilities_for(draw, shape, dtype):
    if not isinstance(draw, BernoulliTensor):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(shape, generator=torch.Generator().manual_seed(5), dtype=wide)


def whole(draw, dtype, shape, seed, probabilities=None):
    """Returns the global tensor of the emulated device, and its generator."""
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype)
    emulation.fill(tensor, Region.full(shape), draw, generator, probabilities=probabilities)
    return tensor, generator


def offset_of(generator):
    return active_device().generators.position(generator).offset


@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
@pytest.mark.parametrize(
    "numel", [2401, 9000, *(pytest.param(numel, marks=pytest.mark.slow) for numel in (1, 2400))]
)
def test_elements_equal_exact_arithmetic(draw, dtype, numel):
    seed = 2**33 + 11
    given_ = probabilities_for(draw, (numel,), dtype)
    with emulated_device(SMALL):
        drawn, generator = whole(draw, dtype, (numel,), seed, given_)
        spec = kernel_spec(draw, dtype, numel)
        schedule = launch_schedule(spec.access, numel, dtype.itemsize, SMALL)
        assert offset_of(generator) == schedule.advance
    exact = spec.kind not in (PhiloxKind.NORMAL, PhiloxKind.EXPONENTIAL)
    for index in range(0, numel, 1 + numel // 300):
        place = schedule.launches[0].word_source(index)
        p = 0.0 if given_ is None else given_[index].item()
        expected = value_of(spec, words(seed, 0, place), place.lane, p)
        found = drawn[index].item()
        if exact:
            assert found == expected
        else:
            # 4e-6 of the value's scale, and one unit in the last place of the dtype.
            last = torch.finfo(dtype).eps * abs(expected)
            slack = 1e-13 if dtype == torch.float64 else 1e-5
            assert abs(found - expected) <= last + slack


@pytest.mark.parametrize("set_name", ["baseline", "avx2"])
@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_no_bit_depends_on_the_instruction_set(draw, dtype, set_name):
    best = _core.instruction_set()
    given_ = probabilities_for(draw, (5000,), dtype)
    with emulated_device(SMALL):
        expected, _ = whole(draw, dtype, (5000,), 3, given_)
        if not _core.use_instruction_set(set_name):
            pytest.skip(f"this processor lacks {set_name}")
        try:
            drawn, _ = whole(draw, dtype, (5000,), 3, given_)
        finally:
            _core.use_instruction_set(best)
    assert drawn.equal(expected)


# torch.manual_seed(0); torch.rand(9, 4, device="cuda"), from tests of NVIDIA/TensorRT-LLM
# (test_redrafter.py, _unpack_gen_data).
RAND_OF_SEED_0 = [
    0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096, 0.1183, 0.0752,
    0.4092, 0.9601, 0.2093, 0.1940, 0.8909, 0.4387, 0.3570, 0.5454, 0.8299, 0.2099, 0.7684, 0.4290,
    0.2117, 0.6606, 0.1654, 0.4250, 0.9927, 0.6964, 0.2472, 0.7028, 0.7494, 0.9303, 0.0494, 0.0750,
]  # fmt: skip
# torch.manual_seed(0); torch.randn(8, 8, device="cuda"), its first rows, from the notes on the
# Triton lecture of github.com/gpu-mode.
RANDN_OF_SEED_0 = [
    -0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284, -1.0745, -0.3631,
    -1.6711, 2.2655, 0.3117, -0.1842, 1.2866, 1.1820, -0.1271, 1.2169, 1.4353, 1.0605, -0.4941,
    -1.4244, -0.7244, -1.2973, 0.0697, -0.0074, 1.8969, 0.6878, -0.0779, -0.8373, 1.3506, -0.2879,
]  # fmt: skip


@pytest.mark.parametrize(
    ("draw", "printed"),
    [(Uniform(), RAND_OF_SEED_0), (Normal(), RANDN_OF_SEED_0)],
    ids=["rand", "randn"],
)
@pytest.mark.parametrize("geometry", [Geometry.A100, Geometry.L4], ids=["A100", "L4"])
def test_recorded_numbers_of_real_gpus_are_reproduced(draw, printed, geometry):
    tensor = torch.empty(len(printed))
    with emulated_device(geometry):
        torch.manual_seed(0)
        emulation.fill(tensor, Region.full(tensor.shape), draw)
    torch.testing.assert_close(tensor, torch.tensor(printed), rtol=0, atol=5.1e-5)


FEW_SHAPES = [(7,), (64, 80)]
SHAPES = [*FEW_SHAPES, (4, 6), (3, 4, 5), (2, 3, 2, 5), (5, 3, 7, 40)]
# Whatever is drawn, its elements are found by one of these: four or two a call, or vectors.
PATHS = [
    (Uniform(), torch.float32),
    (Normal(), torch.float64),
    (BernoulliTensor(), torch.float32),
    (FusedDropout(0.1, 4), torch.bool),
]


def regions_of(shape):
    """Yields regions that contain the tensor once: sharded by 1 or 2 dims, flat, interleaved."""
    full = Region.full(shape)
    for dim, size in enumerate(shape):
        for parts in (2, 3):
            step = -(-size // parts)
            yield [
                full.select(dim, IndexRange(min(i * step, size), min(i * step + step, size)))
                for i in range(parts)
            ]
        yield [
            full.select(dim, *(IndexRange(i, i + 1) for i in range(start, size, 2)))
            for start in (0, 1)
        ]
    if len(shape) > 1:
        ends = [
            (IndexRange(0, size // 2), IndexRange(size // 2, size))
            for size in (shape[0], shape[-1])
        ]
        last = len(shape) - 1
        yield [full.select(0, rows).select(last, columns) for rows, columns in product(*ends)]
    numel = full.numel
    yield [Region.flat(shape, start, min(start + 5, numel)) for start in range(0, numel, 5)][:40]
    yield [full.within(IndexRange(1, numel // 3), IndexRange(numel // 2, numel - 1))]


def assert_shards_equal_the_single_device(draw, dtype, shapes):
    with emulated_device(SMALL):
        for shape in shapes:
            given_ = probabilities_for(draw, shape, dtype)
            expected, reference = whole(draw, dtype, shape, 8, given_)
            for regions in regions_of(shape):
                for region in regions:
                    assert_shard(draw, region, expected, given_, offset_of(reference))


@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_shards_equal_the_single_device(draw, dtype):
    assert_shards_equal_the_single_device(draw, dtype, FEW_SHAPES)


@pytest.mark.parametrize(
    ("draw", "dtype"),
    [pytest.param(*case, marks=() if case in PATHS else pytest.mark.slow) for case in CASES],
    ids=name,
)
def test_shards_of_every_shape_equal_the_single_device(draw, dtype):
    assert_shards_equal_the_single_device(draw, dtype, SHAPES)


def assert_shard(draw, region, expected, given_, offset, strides=None):
    """Fills the region, and compares values and offset with those of the global tensor."""
    wanted = slice_of(expected, region)
    local = torch.empty(wanted.shape, dtype=wanted.dtype)
    if strides is not None:
        local = torch.empty_strided(wanted.shape, strides, dtype=wanted.dtype)
    probabilities = None if given_ is None else slice_of(given_, region)
    generator = torch.Generator().manual_seed(8)
    emulation.fill(local, region, draw, generator, probabilities=probabilities)
    assert local.equal(wanted)
    assert offset_of(generator) == offset


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize(
    ("draw", "dtype"),
    [
        (Uniform(), torch.float32),
        (Normal(), torch.float64),
        (BernoulliTensor(), torch.float32),
        (FusedDropout(0.3, 4), torch.bool),
    ],
    ids=name,
)
def test_permuted_tensors_are_drawn_in_memory_order(draw, dtype, order):
    shape = (4, 6, 50)
    region = Region.full(shape).with_memory_order(order)
    given_ = probabilities_for(draw, shape, dtype)
    in_memory = tuple(shape[dim] for dim in order)
    back = tuple(order.index(dim) for dim in range(3))
    with emulated_device(SMALL):
        flat_given = None if given_ is None else given_.permute(order).contiguous()
        expected, reference = whole(draw, dtype, in_memory, 8, flat_given)
        expected = expected.permute(back)
        for dim in range(3):
            for piece in (IndexRange(0, 1), IndexRange(1, 4)):
                assert_shard(
                    draw, region.select(dim, piece), expected, given_, offset_of(reference)
                )


def test_dropout_that_cannot_vectorise_counts_by_dims():
    # An odd number of elements: torch's fused_dropout_kernel converts logical indices to offsets.
    shape, draw = (3, 5, 7), FusedDropout(0.3, 4)
    with emulated_device(SMALL):
        expected, reference = whole(draw, torch.bool, shape, 8)
        region = Region.full(shape).with_memory_order((2, 0, 1)).select(1, IndexRange(1, 4))
        strides = (3, 1, 9)
        assert_shard(draw, region, expected, None, offset_of(reference), strides)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_of_a_tensor_of_a_full_device(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
    offsets = [data.draw(st.integers(0, size)) for size in shape]
    sizes = [
        data.draw(st.integers(0, size - offset))
        for size, offset in zip(shape, offsets, strict=True)
    ]
    with emulated_device(Geometry(data.draw(st.integers(1, 5)), 256)):
        expected, reference = whole(Uniform(), torch.float32, shape, 8)
        region = Region.box(shape, offsets, sizes)
        assert_shard(Uniform(), region, expected, None, offset_of(reference))


def test_a_slice_of_a_tensor_beyond_32_bit_indexing():
    numel, draw = 2**31 + 12345, Uniform()  # 8 GiB, not allocated
    spec = kernel_spec(draw, torch.float32, numel)
    schedule = launch_schedule(spec.access, numel, 4, Geometry.H100)
    assert len(schedule.launches) == 8  # halves and quarters are still too large
    with emulated_device(Geometry.H100):
        for launch in schedule.launches[:4]:
            start = launch.stop - 3
            local, generator = torch.empty(7), torch.Generator().manual_seed(1)
            emulation.fill(local, Region.flat((numel,), start, start + 7), draw, generator)
            assert offset_of(generator) == schedule.advance
            for i in range(7):
                into = schedule.launch_of(start + i)
                place = into.word_source(start + i)
                made = words(1, into.offset, place)
                assert local[i].item() == value_of(spec, made, place.lane)


def test_empty_shards_advance_and_empty_tensors_do_not():
    with emulated_device(SMALL):
        generator = torch.Generator().manual_seed(0)
        emulation.fill(torch.empty(0, 4), Region.box((3, 4), (3, 0), (0, 4)), Normal(), generator)
        assert offset_of(generator) == 4
        emulation.fill(torch.empty(0, 4), Region.full((0, 4)), Normal(), generator)
        assert offset_of(generator) == 4


def test_invalid_input_raises():
    with pytest.raises(RuntimeError, match="emulated GPU"):
        emulation.fill(torch.empty(3), Region.full((3,)), Uniform())
    local, region = torch.empty(3), Region.full((3,))
    with emulated_device(SMALL):
        with pytest.raises(ValueError, match="no probabilities"):
            emulation.fill(local, region, Uniform(), probabilities=torch.ones(3))
        with pytest.raises(ValueError, match=r"expected .* \(3,\), got .* \(2,\)"):
            emulation.fill(local, region, BernoulliTensor(), probabilities=torch.ones(2))
        with pytest.raises(ValueError, match=r"in \[0, 1\]"):
            emulation.fill(local, region, BernoulliTensor(), probabilities=torch.full((3,), 1.5))
        with pytest.raises(TypeError, match="floating-point"):
            emulation.fill(
                local, region, BernoulliTensor(), probabilities=torch.ones(3, dtype=torch.int64)
            )
