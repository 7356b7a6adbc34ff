"""On a device: the kernels and the emulator against torch's operators, bit for bit.

Every [R] line of the facts page that concerns CUDA has a test here. ``tools/gpu.sh`` runs them.
"""

import struct

import pytest
import torch

from dist_rng import cuda, emulation, skip, words_between
from dist_rng.cuda.library import LIBRARY
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
from dist_rng.philox.kernel_spec import PhiloxKind, kernel_spec
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import Region
from testkit.parity import assert_bitwise

from .cuda_cases import (
    CASES,
    DROPOUT_PROBABILITIES,
    DROPOUT_SHAPES,
    FLOATS,
    LARGE,
    OTHER_GEOMETRIES,
    OTHER_GEOMETRY_CASES,
    OTHER_GEOMETRY_NUMEL,
    PERMUTED_DRAWS,
    PERMUTED_ORDER,
    PERMUTED_SHAPE,
    SHARDED_SHAPE,
    SIZES,
    UNSIGNED,
    dropped_out,
    mixed_draws,
    name,
    parts_of_large,
    permuted,
    shards,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:.*is out of bounds.*:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(not LIBRARY.exists(), reason="dist-rng was built without nvcc"),
]

SIGNED = dict(zip(UNSIGNED, (torch.int16, torch.int32, torch.int64), strict=True))


def new_generator(seed=2**40 + 17, offset=44):
    generator = torch.Generator("cuda").manual_seed(seed)
    generator.set_offset(offset)
    return generator


def probabilities_for(draw, shape, dtype):
    if not isinstance(draw, BernoulliTensor):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.rand(shape, dtype=wide, generator=torch.Generator().manual_seed(5)).cuda()


def torch_draw(tensor, draw, generator, given):
    match draw:
        case Uniform(low, high):
            return tensor.uniform_(low, high, generator=generator)
        case Normal(mean, std):
            return tensor.normal_(mean, std, generator=generator)
        case Exponential(rate):
            return tensor.exponential_(rate, generator=generator)
        case Bernoulli(p):
            return tensor.bernoulli_(p, generator=generator)
        case BernoulliTensor():
            return tensor.bernoulli_(given, generator=generator)
        case Integers(low, high):
            return tensor.random_(low, high, generator=generator)
        case AllIntegers():
            return tensor.random_(generator=generator)


def signed(tensor):
    """Views the bits as a dtype that torch can slice and compare on every device."""
    return tensor.view(SIGNED.get(tensor.dtype, tensor.dtype))


def assert_same(region, draw, expected, after, given=None, strides=None):
    """Fills the region; values and the generator's state must be the single device's."""
    wanted = slice_of(signed(expected), region)
    strides = wanted.contiguous().stride() if strides is None else strides
    local = torch.empty_strided(wanted.shape, strides, dtype=expected.dtype, device="cuda")
    probabilities = None if given is None else slice_of(given, region)
    generator = new_generator()
    cuda.fill(local, region, draw, generator, probabilities=probabilities)
    assert_bitwise(signed(local), wanted)
    assert generator.get_state().equal(after)


def single_device(draw, dtype, shape, given=None):
    generator, tensor = new_generator(), torch.empty(shape, dtype=dtype, device="cuda")
    torch_draw(tensor, draw, generator, given)
    return tensor, generator.get_state()


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_whole_tensors_equal_torch(draw, dtype, numel):
    given = probabilities_for(draw, (numel,), dtype)
    expected, after = single_device(draw, dtype, (numel,), given)
    assert_same(Region.full((numel,)), draw, expected, after, given)


@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_shards_equal_torch(draw, dtype):
    given = probabilities_for(draw, SHARDED_SHAPE, dtype)
    expected, after = single_device(draw, dtype, SHARDED_SHAPE, given)
    for region in shards():
        assert_same(region, draw, expected, after, given)


@pytest.mark.parametrize("draw", PERMUTED_DRAWS, ids=name)
def test_permuted_tensors_equal_torch(draw):
    shape, order = PERMUTED_SHAPE, PERMUTED_ORDER
    tensor = torch.empty([shape[dim] for dim in order], device="cuda").permute(1, 2, 0)
    assert tensor.shape == shape
    given = probabilities_for(draw, shape, torch.float32)
    if given is not None:
        given = torch.empty_like(tensor).copy_(given)
    generator = new_generator()
    torch_draw(tensor, draw, generator, given)
    for part in permuted():
        assert_same(part, draw, tensor, generator.get_state(), given, part.dense_strides())


@pytest.mark.parametrize("p", DROPOUT_PROBABILITIES)
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("shape", DROPOUT_SHAPES, ids=str)
def test_fused_dropout_equals_torch(dtype, shape, p):
    for reversed_order in (False, True):
        ones = torch.ones(shape, dtype=dtype, device="cuda")
        if reversed_order:
            ones = torch.ones(shape[::-1], dtype=dtype, device="cuda").permute(
                *range(len(shape))[::-1]
            )
        torch.manual_seed(3)
        _, mask = torch.native_dropout(ones, p, True)
        after = torch.cuda.get_rng_state()
        for part in dropped_out(shape, reversed_order):
            torch.manual_seed(3)
            wanted = slice_of(mask, part)
            local = torch.empty_strided(
                wanted.shape, part.dense_strides(), dtype=torch.bool, device="cuda"
            )
            cuda.fill(local, part, FusedDropout(p, dtype.itemsize))
            assert local.equal(wanted)
            assert torch.cuda.get_rng_state().equal(after)


def test_torchs_native_dropout_with_p_1_draws_nothing_as_the_handler():
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state()
    values, mask = torch.native_dropout(torch.ones(1000, device="cuda"), 1.0, True)
    assert not values.any()
    assert not mask.any()
    assert torch.cuda.get_rng_state().equal(before)


def test_a_sequence_of_mixed_draws_equals_torch():
    def sequence(fill):
        torch.manual_seed(1)
        drawn = []
        for draw, dtype, numel in mixed_draws():
            drawn.append(torch.empty(numel, dtype=dtype, device="cuda"))
            fill(drawn[-1], draw)
        return drawn, torch.cuda.get_rng_state()

    actual, actual_state = sequence(
        lambda tensor, draw: cuda.fill(tensor, Region.full(tensor.shape), draw)
    )
    expected, expected_state = sequence(lambda tensor, draw: torch_draw(tensor, draw, None, None))
    for one, other in zip(actual, expected, strict=True):
        assert_bitwise(signed(one), signed(other))
    assert actual_state.equal(expected_state)


@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_the_emulator_reproduces_this_device(draw, dtype):
    numel = 5_000_011
    given = probabilities_for(draw, (numel,), dtype)
    tensor = torch.empty(numel, dtype=dtype, device="cuda")
    torch_draw(tensor, draw, torch.Generator("cuda").manual_seed(9), given)
    local, generator = torch.empty(numel, dtype=dtype), torch.Generator().manual_seed(9)
    with emulated_device(Geometry.of_device()):
        emulation.fill(
            local,
            Region.full((numel,)),
            draw,
            generator,
            probabilities=None if given is None else given.cpu(),
        )
    if kernel_spec(draw, dtype, numel).kind not in (PhiloxKind.NORMAL, PhiloxKind.EXPONENTIAL):
        assert_bitwise(signed(local), signed(tensor.cpu()))
        return
    # The error that emulation/backend.py documents, and one unit in the last place of the dtype.
    scale = draw.std if isinstance(draw, Normal) else 1.0 / draw.rate
    absolute = 1e-14 if dtype == torch.float64 else 4e-6 * scale
    relative = 4 * torch.finfo(dtype).eps + (0.0 if dtype == torch.float64 else 4e-6)
    torch.testing.assert_close(local, tensor.cpu(), rtol=relative, atol=absolute)


@pytest.mark.parametrize("geometry", OTHER_GEOMETRIES, ids=str)
@pytest.mark.parametrize(("draw", "dtype"), OTHER_GEOMETRY_CASES, ids=name)
def test_a_device_reproduces_another_geometry(draw, dtype, geometry):
    region = Region.full((OTHER_GEOMETRY_NUMEL,))
    on_cpu = torch.empty(region.global_shape, dtype=dtype)
    on_gpu = torch.empty(region.global_shape, dtype=dtype, device="cuda")
    with emulated_device(geometry):
        emulation.fill(on_cpu, region, draw, torch.Generator().manual_seed(4))
        cuda.fill(on_gpu, region, draw, torch.Generator("cuda").manual_seed(4))
    assert on_gpu.cpu().equal(on_cpu)


@pytest.mark.parametrize(("numel", "dtype"), LARGE, ids=str)
def test_tensors_beyond_32_bit_indexing(numel, dtype):
    if torch.cuda.mem_get_info()[0] < 3 * numel * dtype.itemsize:
        pytest.skip(f"needs {3 * numel * dtype.itemsize / 2**30:.0f} GiB of free device memory")
    draw = Uniform() if dtype.is_floating_point else AllIntegers()
    expected, after = single_device(draw, dtype, (numel,))
    for region in parts_of_large(numel):
        assert_same(region, draw, expected, after)


def test_the_current_stream_is_used():
    stream = torch.cuda.Stream()
    tensor = torch.zeros(5_000_000, device="cuda")
    expected, _ = single_device(Uniform(), torch.float32, tensor.shape)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        tensor.fill_(7.0)
        cuda.fill(tensor, Region.full(tensor.shape), Uniform(), new_generator())
    stream.synchronize()
    assert tensor.equal(expected)


def test_a_cpu_generator_raises():
    with pytest.raises(ValueError, match=r"expected a generator on cuda:0.* got one on cpu"):
        cuda.fill(torch.empty(3, device="cuda"), Region.full((3,)), Uniform(), torch.Generator())


@pytest.mark.skipif(
    hasattr(torch.Generator, "philox_state"),
    reason="torch 2.14 and later say where a captured generator stands",
)
def test_capture_raises_where_torch_does_not_expose_the_generator_state():
    tensor = torch.empty(3, device="cuda")

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.zero_()
            cuda.fill(tensor, Region.full((3,)), Uniform())

    with pytest.raises(RuntimeError, match=r"torch 2\.14 .*Generator\.philox_state"):
        capture()


@pytest.mark.skipif(not hasattr(torch.Generator, "philox_state"), reason="needs torch 2.14")
def test_captured_graphs_advance_the_generator_as_torch_does():
    def replays(fill):
        torch.manual_seed(5)
        tensors = [torch.zeros(3_000_001, device="cuda") for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for tensor in tensors:
                fill(tensor)
        seen = []
        for _ in range(3):
            graph.replay()
            seen.append(torch.stack(tensors).clone())
        return torch.stack(seen), torch.cuda.get_rng_state()

    cuda.fill(
        torch.empty(3, device="cuda"), Region.full((3,)), Normal()
    )  # load the library outside of the capture
    actual, actual_state = replays(
        lambda tensor: cuda.fill(tensor, Region.full(tensor.shape), Normal())
    )
    expected, expected_state = replays(lambda tensor: tensor.normal_())
    assert actual.equal(expected)
    assert actual_state.equal(expected_state)


def test_a_generator_that_skips_ends_in_the_state_of_one_that_has_drawn():
    generator = torch.Generator("cuda").manual_seed(9)
    before = generator.get_state()
    assert struct.unpack("<Qq", bytes(before.tolist())) == (9, 0)  # the seed and the offset
    torch.empty(100_003, device="cuda").normal_(generator=generator)
    torch.empty(7, device="cuda").bernoulli_(0.3, generator=generator)
    after = generator.get_state()
    generator.set_state(before)
    skip(words_between(before, after), generator)
    assert_bitwise(generator.get_state(), after)
    with pytest.raises(ValueError, match="a multiple of 4"):
        skip(3, generator)
