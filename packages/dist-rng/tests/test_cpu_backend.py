"""Shards on CPU against one CPU: values and generator state, bit for bit.

Every region is filled separately and compared with the indexed part of torch's draw of the global
tensor; the generator must end in the state of torch's, whatever the region holds.
"""

from itertools import pairwise, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_rng import cpu
from dist_rng.distributions import (
    AllIntegers,
    Bernoulli,
    BernoulliTensor,
    Cauchy,
    Exponential,
    FusedDropout,
    Geometric,
    Integers,
    LogNormal,
    Normal,
    Uniform,
)
from dist_rng.regions.placements import slice_of
from dist_rng.regions.region import IndexRange, Region
from testkit.parity import assert_bitwise

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMMON = (*FLOATS, *INTS, torch.bool)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

CASES = [
    *product([Uniform(-0.3, 0.55)], FLOATS),
    *product([Normal(0.3, 1.7)], FLOATS),
    *product([Exponential(1.3)], FLOATS),
    *product([Cauchy(0.3, 1.7)], FLOATS),
    *product([Geometric(0.3)], (*FLOATS, *INTS)),
    *product([LogNormal(0.3, 1.7)], FLOATS),
    *product([Bernoulli(0.3)], COMMON),
    *product([AllIntegers()], COMMON),
    *product([Integers(0, 2)], (*COMMON, *UNSIGNED)),
    *product([Integers(3, 100)], (*FLOATS, *INTS, *UNSIGNED)),
    *product([Integers(-(2**31), 2**31 - 1)], (torch.int32, torch.int64)),
]
EDGES = [
    *product([Uniform(), Uniform(1.0, 1.0000002), Uniform(2.0, 2.0)], FLOATS),
    *product([Normal(), Normal(1.0, 0.0), Exponential()], FLOATS),
    *product([Cauchy(), Cauchy(1e30, 1e-30), LogNormal(), LogNormal(90.0, 9.0)], FLOATS),
    *product([Geometric(1e-300), Geometric(1.0 - 2**-53)], FLOATS),
    # Numbers beyond the dtype: the conversion of C++ to an integer wraps around.
    *product([Geometric(1e-3), Geometric(1e-8)], (torch.uint8, torch.int16, torch.int64)),
    *product([Bernoulli(0.0), Bernoulli(1.0), Bernoulli(1e-300)], (torch.float32, torch.bool)),
    *product([Integers(0, 1)], (*COMMON, *UNSIGNED)),
    *product([Integers(0, 2**28 - 1), Integers(0, 2**28)], (torch.int32, torch.uint32)),
    *product([Integers(-5, 2**27), Integers(0, 2**27 - 1)], (torch.int32, torch.int64)),
    (Integers(-(2**63), 2**63 - 1), torch.int64),
    (Integers(0, 2**63 - 1), torch.uint64),
    (Integers(-1000, 2049), torch.float16),  # not every value is a half: the bounds move
    (Integers(-300, 257), torch.bfloat16),
    (Integers(0, 2**24 + 1), torch.float32),
]
SHAPES = [
    (), (0,), (1,), (2,), (15,), (16,), (17,), (31,), (33,), (47,), (623,), (1249,), (3, 0, 2),
    (5, 7), (16, 16), (3, 5, 7), (2, 3, 4, 5), (2, 3, 2, 3, 4), (40, 33),
]  # fmt: skip
# Those of one dim are at the limits of blocks of 16 and of 624 words.
FAST_SHAPES = [shape for shape in SHAPES if len(shape) < 2] + [(3, 0, 2), (5, 7), (3, 5, 7)]


def name(value):
    return str(value).removeprefix("torch.").replace(" ", "")


def torch_draw(tensor, draw, generator, probabilities=None):
    match draw:
        case Uniform(low, high):
            return tensor.uniform_(low, high, generator=generator)
        case Normal(mean, std):
            return tensor.normal_(mean, std, generator=generator)
        case Exponential(rate):
            return tensor.exponential_(rate, generator=generator)
        case Cauchy(median, sigma):
            return tensor.cauchy_(median, sigma, generator=generator)
        case Geometric(p):
            return tensor.geometric_(p, generator=generator)
        case LogNormal(mean, std):
            return tensor.log_normal_(mean, std, generator=generator)
        case Bernoulli(p):
            return tensor.bernoulli_(p, generator=generator)
        case BernoulliTensor():
            return tensor.bernoulli_(probabilities, generator=generator)
        case Integers(low, high):
            return tensor.random_(low, high, generator=generator)
        case AllIntegers():
            return tensor.random_(generator=generator)


def in_memory_order(shape, order, dtype):
    """Returns a global tensor whose dims have this order in memory."""
    dense = torch.zeros([shape[dim] for dim in order], dtype=dtype)
    return dense.permute([order.index(dim) for dim in range(len(shape))])


def chunks(region, dim, ranks):
    """Returns what Shard(dim) gives each rank: torch.chunk's pieces, empty ones included."""
    size = region.grid_shape[dim]
    each = -(-size // ranks)
    cuts = [min(rank * each, size) for rank in range(ranks + 1)]
    return [region.select(dim, IndexRange(a, b)) for a, b in pairwise(cuts)]


def splits(shape):
    """Yields lists of regions, each of which contains every element once."""
    whole = Region.full(shape)
    yield [whole]
    for dim in range(len(shape)):
        for ranks in (2, 3, 8):
            yield chunks(whole, dim, ranks)
        evens = [IndexRange(i, i + 1) for i in range(0, shape[dim], 2)]
        odds = [IndexRange(i, i + 1) for i in range(1, shape[dim], 2)]
        yield [whole.select(dim, *evens), whole.select(dim, *odds)]
        for again in range(len(shape)):
            yield [cut for part in chunks(whole, dim, 2) for cut in chunks(part, again, 3)]
    numel = whole.numel
    thirds = [IndexRange(numel * i // 3, numel * (i + 1) // 3) for i in range(3)]
    yield [whole.within(window) for window in thirds]
    yield [whole.within(thirds[0], thirds[2]), whole.within(thirds[1])]
    if shape:
        halves = chunks(whole, len(shape) - 1, 2)
        yield [
            half.within(*windows)
            for half in halves
            for windows in (
                (IndexRange(0, half.numel // 3),),
                (IndexRange(half.numel // 3, half.numel),),
            )
        ]


def local_for(region, dtype, spread=False):
    shape = (region.numel,) if region.windows is not None else region.grid_shape
    if spread and region.windows is None:  # dims reversed in memory, with gaps
        base = torch.zeros([*(2 * size + 1 for size in reversed(shape))], dtype=dtype)
        return base[tuple(slice(0, 2 * size, 2) for size in reversed(shape))].permute(
            *reversed(range(len(shape)))
        )
    return torch.zeros(shape, dtype=dtype)


def check_regions(regions, draw, dtype, start, spread=False, chances=None):
    """Fills every region, starting with the generator state ``start``, and compares with torch."""
    first = regions[0]
    generator = torch.Generator()
    generator.set_state(start)
    single = in_memory_order(first.global_shape, first.memory_order, dtype)
    torch_draw(single, draw, generator, chances)
    after = generator.get_state()
    for region in regions:
        generator.set_state(start)
        local = local_for(region, dtype, spread)
        local_probabilities = None
        if chances is not None:
            local_probabilities = slice_of(chances.expand(first.global_shape), region).reshape(
                local.shape
            )
        cpu.fill(local, region, draw, generator, probabilities=local_probabilities)
        expected = slice_of(single, region).reshape(local.shape)
        assert_bitwise(local, expected, f"{draw} {region}")
        assert torch.equal(generator.get_state(), after), f"generator after {draw} {region}"


def started(words=5, seed=0, cached=False):
    """Returns the state of a used generator, with or without a cached sample of normal_."""
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words).uniform_(generator=generator)
    if cached:
        torch.empty(1).normal_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize(
    "shapes", [FAST_SHAPES, pytest.param(SHAPES, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize(("draw", "dtype"), CASES, ids=name)
def test_shards_of_every_shape_equal_one_devices_draw(draw, dtype, shapes):
    for shape in shapes:
        for regions in splits(shape):
            check_regions(regions, draw, dtype, started())


@pytest.mark.parametrize(("draw", "dtype"), EDGES, ids=name)
@pytest.mark.filterwarnings("ignore:.*out of bounds:UserWarning")
def test_arguments_at_the_limits_of_their_range(draw, dtype):
    for shape in [(1,), (17,), (5, 7), (3001,), (40, 100)]:
        whole = Region.full(shape)
        check_regions([whole, *chunks(whole, 0, 3)], draw, dtype, started())


@pytest.mark.parametrize("modulus", [3, 7, 49, 98, 99, 103, 12_345, 50_257, 2**27 - 1, 2**28 - 1])
def test_integers_of_a_range_whose_reciprocal_is_inexact(modulus):
    # 49 * (1.0 / 49) is less than 1, as for some other multiples of 49.
    numel = 300_000
    check_regions([Region.full((numel,))], Integers(0, modulus), torch.int32, started())


@pytest.mark.parametrize(("dtype", "chance"), [*product(COMMON, FLOATS)], ids=name)
def test_shards_draw_from_a_tensor_of_probabilities(dtype, chance):
    for shape in [(), (1,), (17,), (5, 7), (2, 3, 4, 5), (700,)]:
        generator = torch.Generator().manual_seed(9)
        chances = torch.rand(shape, dtype=torch.float32, generator=generator).to(chance)
        for regions in splits(shape):
            check_regions(regions, BernoulliTensor(), dtype, started(), chances=chances)


def test_probabilities_may_be_expanded_and_permuted():
    for chances in (torch.rand(5, 1), torch.rand(7), torch.rand(7, 5).t()):
        for regions in splits((5, 7)):
            for spread in (False, True):
                args = regions, BernoulliTensor(), torch.float32, started(), spread
                check_regions(*args, chances=chances.expand(5, 7))


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
@pytest.mark.parametrize("numel", [*range(1, 36), 623, 624, 625, 1248, 4096, 4097, 5011])
def test_normal_blocks_remainders_and_pairs_of_every_length(dtype, numel):
    for cached in (False, True):
        whole = Region.full((numel,))
        regions = [whole, *chunks(whole, 0, 3), *chunks(whole, 0, 7)]
        regions += [Region.flat((numel,), i, i + 1) for i in range(max(0, numel - 20), numel)]
        for draw in (Normal(0.3, 1.7), LogNormal(0.3, 1.7)):
            check_regions(regions, draw, dtype, started(cached=cached))


SPREAD_CASES = [
    (Uniform(), torch.float32),
    (Normal(), torch.float32),
    (Normal(), torch.bfloat16),
    (Normal(), torch.float64),
    (LogNormal(), torch.float32),
    (Cauchy(), torch.float64),
    (Geometric(0.1), torch.int16),
    (Bernoulli(0.3), torch.uint8),
    (Integers(3, 100), torch.int64),
]


@pytest.mark.parametrize(("draw", "dtype"), SPREAD_CASES, ids=name)
@pytest.mark.parametrize("shape", [(1250,), (5, 7), (33, 40), (3, 5, 7), (2, 3, 4, 5)], ids=name)
def test_local_tensors_may_have_any_strides(draw, dtype, shape):
    for regions in splits(shape):
        check_regions(regions, draw, dtype, started(), spread=True)


@pytest.mark.parametrize(("draw", "dtype"), SPREAD_CASES, ids=name)
@pytest.mark.parametrize("shape", [(5, 7), (20, 1), (1, 20), (3, 5, 7), (4, 1, 6), (2, 3, 4, 5)])
def test_draws_follow_the_memory_order_of_the_global_tensor(draw, dtype, shape):
    for order in permutations(range(len(shape))):
        whole = Region.full(shape).with_memory_order(order)
        regions = [whole, *chunks(whole, 0, 2), *chunks(whole, len(shape) - 1, 3)]
        for cached in (False, True):
            for spread in (False, True):
                check_regions(regions, draw, dtype, started(cached=cached), spread)


MIXED = [
    (Uniform(), torch.float32, (5, 7)),
    (Normal(), torch.float32, (3,)),
    (Normal(), torch.float64, (4, 8)),
    (Bernoulli(0.4), torch.bool, (9,)),
    (Normal(), torch.bfloat16, (5,)),
    (Integers(0, 2**40), torch.int64, (3, 3)),
    (Normal(2.0, 3.0), torch.float32, (41,)),
    (Exponential(), torch.float64, (7,)),
    (LogNormal(), torch.float32, (21,)),
    (Cauchy(), torch.float16, (6,)),
    (Geometric(0.2), torch.int8, (2, 9)),
    (AllIntegers(), torch.int16, (11,)),
    (Normal(), torch.float16, (0,)),
    (Normal(), torch.float16, (1,)),
]


@pytest.mark.parametrize("part", [0, 1, 2])
def test_fifty_mixed_draws_end_with_one_devices_state_and_cached_sample(part):
    single, sharded = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    for step in range(50):
        draw, dtype, shape = MIXED[step * 5 % len(MIXED)]
        expected = torch_draw(torch.empty(shape, dtype=dtype), draw, single)
        region = chunks(Region.full(shape), 0, 3)[part]
        local = torch.empty(region.grid_shape, dtype=dtype)
        cpu.fill(local, region, draw, sharded)
        assert_bitwise(local, slice_of(expected, region), f"step {step}")
        assert torch.equal(single.get_state(), sharded.get_state()), f"state after step {step}"


@st.composite
def cut_regions(draw):
    """A region that is sharded by dims several times, possibly with windows at the end."""
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=5)))
    region = Region.full(shape)
    if draw(st.booleans()):
        region = region.with_memory_order(draw(st.permutations(range(len(shape)))))
    for _ in range(draw(st.integers(0, 3))):
        dim = draw(st.integers(0, len(shape) - 1))
        cuts = sorted(draw(st.sets(st.integers(0, region.grid_shape[dim]), max_size=4)))
        ranges = [IndexRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        region = region.select(dim, *ranges)
    if region.memory_order == tuple(range(len(shape))) and draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(0, region.numel), max_size=6)))
        region = region.within(
            *(IndexRange(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
        )
    return region


@settings(max_examples=400, deadline=None)
@given(
    region=cut_regions(),
    case=st.sampled_from([*CASES, *EDGES]),
    words=st.integers(0, 1300),
    cached=st.booleans(),
    spread=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:.*out of bounds:UserWarning")
def test_any_region_of_any_draw(region, case, words, cached, spread):
    check_regions([region], *case, started(words, cached=cached), spread)


def test_distant_regions_are_reached_by_a_jump():
    numel = 150_000_000
    region = Region.full((numel,)).select(0, IndexRange(5, 9), IndexRange(numel - 40, numel - 3))
    generator = torch.Generator().manual_seed(8)
    local = torch.empty(region.numel)
    cpu.fill(local, region, Uniform(), generator)
    chunk, expected = torch.Generator().manual_seed(8), []
    buffer = torch.empty(10_000_000)
    for start in range(0, numel, buffer.numel()):
        buffer.uniform_(generator=chunk)
        if start == 0:
            expected.append(buffer[5:9].clone())
    expected.append(buffer[-40:-3])
    assert_bitwise(local, torch.cat(expected))
    assert torch.equal(generator.get_state(), chunk.get_state())


def test_default_generator_and_version_counter_advance_as_torchs():
    local = torch.empty(6)
    version = local._version
    torch.manual_seed(3)
    cpu.fill(local, Region.full((6,)), Uniform(), None)
    assert local._version == version + 1
    actual, state = local.clone(), torch.get_rng_state()
    torch.manual_seed(3)
    assert_bitwise(actual, local.uniform_())
    assert torch.equal(state, torch.get_rng_state())


def test_inference_tensors_are_filled():
    with torch.inference_mode():
        local = torch.empty(6)
        cpu.fill(local, Region.full((6,)), Uniform(), torch.Generator().manual_seed(3))
    assert_bitwise(
        local.clone(), torch.empty(6).uniform_(generator=torch.Generator().manual_seed(3))
    )


WRONG = [
    (Uniform(), torch.int64, TypeError, "Uniform: expected one of"),
    (Normal(), torch.bool, TypeError, "convert"),
    (Bernoulli(), torch.uint16, TypeError, "Bernoulli: expected one of"),
    (Uniform(), torch.complex64, TypeError, "Uniform: expected one of"),
    (FusedDropout(), torch.bool, TypeError, "draw a Bernoulli mask"),
    (BernoulliTensor(), torch.float32, TypeError, "probabilities"),
    (Uniform(1.0, 0.0), torch.float32, ValueError, "low <= high"),
    (Normal(0.0, -1.0), torch.float32, ValueError, "standard deviation"),
    (Normal(0.0, float("nan")), torch.float32, ValueError, "standard deviation"),
    (Bernoulli(1.5), torch.float32, ValueError, "probability"),
    (Exponential(0.0), torch.float32, ValueError, "rate"),
    (Cauchy(0.0, 0.0), torch.float32, ValueError, "sigma above 0"),
    (Geometric(0.0), torch.float32, ValueError, "above 0 and below 1"),
    (Geometric(1.0), torch.float32, ValueError, "above 0 and below 1"),
    (LogNormal(0.0, 0.0), torch.float32, ValueError, "standard deviation above 0"),
    (LogNormal(0.0, float("nan")), torch.float32, ValueError, "standard deviation above 0"),
    (Cauchy(), torch.int32, TypeError, "Cauchy: expected one of"),
    (LogNormal(), torch.int32, TypeError, "LogNormal: expected one of"),
    (Geometric(), torch.bool, TypeError, "Geometric: expected one of"),
    (Integers(5, 5), torch.int64, ValueError, "low < high"),
    (Integers(0, 300), torch.uint8, ValueError, "represents"),
]


@pytest.mark.parametrize(("draw", "dtype", "error", "message"), WRONG, ids=name)
def test_invalid_input_raises_and_draws_nothing(draw, dtype, error, message):
    generator = torch.Generator().manual_seed(0)
    state, local = generator.get_state(), torch.zeros(4, dtype=dtype)
    with pytest.raises(error, match=message):
        cpu.fill(local, Region.full((4,)), draw, generator)
    assert torch.equal(generator.get_state(), state)
    assert_bitwise(local, torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_a_probability_out_of_range_raises_before_the_generator_advances(bad):
    generator = torch.Generator().manual_seed(0)
    state, chances = generator.get_state(), torch.tensor([0.5, bad, 0.5])
    with pytest.raises(ValueError, match="expected probabilities"):
        cpu.fill(
            torch.empty(3), Region.full((3,)), BernoulliTensor(), generator, probabilities=chances
        )
    assert torch.equal(generator.get_state(), state)


def test_probabilities_of_another_shape_raise():
    with pytest.raises(ValueError, match="expanded"):
        cpu.fill(
            torch.empty(3),
            Region.full((3,)),
            BernoulliTensor(),
            None,
            probabilities=torch.rand(1),
        )
