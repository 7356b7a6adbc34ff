"""words_between and skip: a generator that skips ends in the state of one that has drawn."""

import struct

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import dist_rng
from dist_rng import Geometry, single_device_rng, skip, words_between
from testkit.parity import assert_bitwise

BLOCK = 624

# Draws of a number of elements, and the words of mt19937 that each takes.
DRAWS = {
    "uniform_": (lambda n: torch.empty(n).uniform_(), lambda n: n),
    "uniform_ f64": (lambda n: torch.empty(n, dtype=torch.float64).uniform_(), lambda n: 2 * n),
    "bernoulli_": (lambda n: torch.empty(n).bernoulli_(0.3), lambda n: 2 * n),
    "dropout": (lambda n: F.dropout(torch.ones(n), 0.1), lambda n: 2 * n),
    "randint": (lambda n: torch.randint(5, (n,)), lambda n: n),
    "random_ of 64 bits": (lambda n: torch.empty(n, dtype=torch.int64).random_(), lambda n: 2 * n),
    "exponential_": (lambda n: torch.empty(n).exponential_(), lambda n: 2 * n),
    # 16 and more: one word an element, and 16 words more for a remainder.
    "normal_": (lambda n: torch.randn(n + 16), lambda n: n + 16 + (16 if n % 16 else 0)),
    # Fewer: pairs of four words; an even number leaves no cached sample.
    "normal_ of pairs": (lambda n: torch.randn(n % 8 * 2), lambda n: n % 8 * 4),
}


@st.composite
def sequences(draw):
    """A sequence of draws, with the words that it takes."""
    steps = draw(st.lists(st.tuples(st.sampled_from(sorted(DRAWS)), st.integers(0, 700))))
    return steps, sum(DRAWS[name][1](n) for name, n in steps)


def cached_sample():
    """Draws a normal sample, of which torch's generator keeps the second of the pair."""
    torch.randn(1)


@settings(max_examples=200, deadline=None)
@given(sequences(), st.integers(0, 1300), st.integers(0, 2**63), st.booleans())
def test_words_of_any_draws_lead_to_their_state(sequence, start, seed, cached):
    steps, words = sequence
    torch.manual_seed(seed)
    torch.rand(start)
    if cached:
        cached_sample()
        steps = [(name, n) for name, n in steps if name != "normal_ of pairs"]
        words = sum(DRAWS[name][1](n) for name, n in steps)
    before = torch.get_rng_state()
    for name, n in steps:
        DRAWS[name][0](n)
    after = torch.get_rng_state()
    assert words_between(before, after) == words
    generator = torch.Generator()
    generator.set_state(before)
    skip(words, generator)
    assert_bitwise(generator.get_state(), after)


EDGES = [0, 1, 2, 396, 397, 622, 623, 624, 625, 1247, 1248, 1249]


@pytest.mark.parametrize("before", EDGES)
def test_distances_within_and_across_the_blocks_of_the_engine(before):
    generator = torch.Generator().manual_seed(3)
    torch.empty(before).uniform_(generator=generator)
    start = generator.get_state()
    for distance in EDGES:
        generator.set_state(start)
        torch.empty(distance).uniform_(generator=generator)
        assert words_between(start, generator.get_state()) == distance


def test_a_distance_that_skip_jumps_over_is_found():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    words = 50_000_000 + 17  # above the 2e7 words from which on skip jumps
    skip(words, generator)
    assert words_between(before, generator.get_state()) == words


def test_skip_advances_the_default_generator_and_a_given_one():
    torch.manual_seed(0)
    numbers = torch.rand(10)
    torch.manual_seed(0)
    skip(4)
    assert_bitwise(torch.rand(6), numbers[4:])
    generator = torch.Generator().manual_seed(0)
    skip(7, generator)
    assert_bitwise(torch.rand(3, generator=generator), numbers[7:])


def test_the_arguments_of_words_between_are_not_changed():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    torch.rand(1000, generator=generator)
    after = generator.get_state()
    copies = before.clone(), after.clone()
    words_between(before, after)
    assert_bitwise(before, copies[0])
    assert_bitwise(after, copies[1])


def test_the_limit_is_the_largest_distance_that_is_returned():
    generator = torch.Generator().manual_seed(5)
    torch.rand(600, generator=generator)
    before = generator.get_state()
    for words in (20, 30, 624, 1200):
        skip(words, generator)
        after = generator.get_state()
        assert words_between(before, after, limit=words) == words
        with pytest.raises(ValueError, match=f"at most {words - 1} words"):
            words_between(before, after, limit=words - 1)
        generator.set_state(before)


@pytest.mark.parametrize("words", [1, BLOCK + 1])
def test_an_earlier_state_is_not_reached(words):
    generator = torch.Generator().manual_seed(5)
    torch.rand(10, generator=generator)
    earlier = generator.get_state()
    skip(words, generator)
    with pytest.raises(ValueError, match="pass the earlier state first"):
        words_between(generator.get_state(), earlier, limit=10**6)


def test_states_of_another_seed_or_kind_raise():
    before = torch.Generator().manual_seed(5).get_state()
    with pytest.raises(ValueError, match="got the seeds 5 and 6"):
        words_between(before, torch.Generator().manual_seed(6).get_state())
    with pytest.raises(ValueError, match="got a CPU generator's and a CUDA generator's"):
        words_between(before, cuda_state(5, 0))
    for wrong in (before[:-1], before.float(), torch.stack([before, before], 1)[:, 0]):
        with pytest.raises(ValueError, match=r"expected as `after` the 5056 bytes"):
            words_between(before, wrong)


def test_a_cached_sample_of_only_one_state_raises():
    torch.manual_seed(2)
    before = torch.get_rng_state()
    cached_sample()
    after = torch.get_rng_state()
    torch.randn(2)  # uses the sample up, and caches another
    later = torch.get_rng_state()
    for states in [(before, after), (after, later)]:
        with pytest.raises(ValueError, match="cached sample of normal_"):
            words_between(*states)


def test_a_skip_leaves_the_cached_sample():
    torch.manual_seed(2)
    cached_sample()
    before = torch.get_rng_state()
    torch.rand(30)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    skip(30)
    assert_bitwise(torch.get_rng_state(), after)


@pytest.mark.parametrize("words", [-1, 2**63])
def test_words_out_of_range_raise_and_skip_nothing(words):
    generator = torch.Generator().manual_seed(1)
    state = generator.get_state()
    with pytest.raises(ValueError, match=f"expected from 0 to .* got {words}"):
        skip(words, generator)
    with pytest.raises(TypeError):
        skip(1.0, generator)
    assert_bitwise(generator.get_state(), state)


def cuda_state(seed, offset):
    """Returns what a CUDA generator's get_state() does (test_cuda_backend.py)."""
    return torch.frombuffer(bytearray(struct.pack("<Qq", seed, offset)), dtype=torch.uint8)


def test_words_of_cuda_states_are_the_difference_of_their_offsets():
    assert words_between(cuda_state(2**64 - 1, 8), cuda_state(2**64 - 1, 36)) == 28
    with pytest.raises(ValueError, match="pass the earlier state first"):
        words_between(cuda_state(1, 36), cuda_state(1, 8))
    with pytest.raises(ValueError, match="got the seeds 1 and 2"):
        words_between(cuda_state(1, 8), cuda_state(2, 8))
    with pytest.raises(ValueError, match="at most 27 words"):
        words_between(cuda_state(1, 8), cuda_state(1, 36), limit=27)


def test_an_emulated_gpu_skips_the_words_of_that_gpu():
    with single_device_rng(geometry=Geometry.H100):
        torch.manual_seed(3)
        torch.rand(5)
        before = torch.get_rng_state()
        F.dropout(torch.ones(100_000), 0.1)
        after = torch.get_rng_state()
        expected = torch.rand(5)
        words = words_between(before, after)
        assert words > 0
        assert words % 4 == 0
        torch.set_rng_state(before)
        skip(words)
        assert_bitwise(torch.rand(5), expected)
        with pytest.raises(ValueError, match="a multiple of 4"):
            skip(3)


def test_an_emulated_gpus_state_without_its_offset_raises():
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    torch.rand(700, generator=generator)  # the next block of the CPU's engine
    after = generator.get_state()
    with (
        single_device_rng(geometry=Geometry.H100),
        pytest.raises(ValueError, match="expected as `after` a state that contains the offset"),
    ):
        words_between(before, after)


def test_a_generator_of_another_device_raises():
    with pytest.raises(ValueError, match="expected a CPU or CUDA generator, got one on meta"):
        dist_rng.skip(4, FakeGenerator())


class FakeGenerator:
    device = torch.device("meta")
