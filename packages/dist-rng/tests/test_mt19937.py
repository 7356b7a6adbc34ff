"""The engine against torch's: state layout, every position in a block, skips and jumps."""

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_rng import _core
from testkit.parity import assert_bitwise

SETS = ("baseline", "avx2", "avx512")
BEST = _core.instruction_set()


@pytest.fixture(params=SETS)
def instruction_set(request):
    if not _core.use_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    assert _core.use_instruction_set(BEST)


def drawn(words, seed=7):
    """Returns a generator with which torch has drawn as many words."""
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words).uniform_(generator=generator)
    return generator


def skipped(state, words):
    state = state.clone()
    _core.skip(state.data_ptr(), words)
    return state


def next_words(state, count):
    """Returns the next words, as 32-bit integers."""
    state, words = state.clone(), torch.empty(count, dtype=torch.int64)
    grid = _core.LocalGrid([[(0, count)]], [1], [1])
    # int64 with range 2**64 - 1 draws 64 bits: the first word is the high half.
    _core.integers(state.data_ptr(), words.data_ptr(), _core.Dtype.int64, grid, count, 2**64 - 1, 0)
    return words


PLACES = [0, 1, 2, 226, 227, 228, 396, 397, 398, 622, 623, 624, 625, 1247, 1248, 1249, 6240]


def test_generator_states_have_the_layout_of_the_compiled_struct():
    generator = torch.Generator().manual_seed(3)
    torch.empty(3, dtype=torch.float64).normal_(generator=generator)  # caches a second sample
    raw = bytes(generator.get_state().numpy())
    assert len(raw) == _core.STATE_BYTES == 5056
    seed, left, seeded, following = struct.unpack_from("<QiiQ", raw)
    assert (seed, left, seeded, following) == (3, 624 - 8 + 1, 1, 8)
    normal_y, valid = struct.unpack_from("<d8xi", raw, 24 + 8 * 624 + 8)
    assert valid == 1
    fourth = torch.empty(1, dtype=torch.float64).normal_(generator=generator).item()
    assert normal_y == fourth


@pytest.mark.parametrize("before", PLACES)
def test_a_skip_from_any_position_ends_at_torchs_position(instruction_set, before):
    start = drawn(before).get_state()
    for count in PLACES:
        expected = drawn(before)
        torch.empty(count).uniform_(generator=expected)
        assert_bitwise(skipped(start, count), expected.get_state(), f"{before} + {count} words")


@given(st.integers(0, 2000), st.integers(0, 5000), st.integers(0, 2**63))
def test_any_skip_ends_at_torchs_position(before, count, seed):
    expected = drawn(before, seed)
    start = expected.get_state()
    torch.empty(count).uniform_(generator=expected)
    assert_bitwise(skipped(start, count), expected.get_state())


def test_a_skip_of_zero_words_does_not_change_a_seeded_generator():
    state = torch.Generator().manual_seed(1).get_state()
    assert_bitwise(skipped(state, 0), state)


def in_steps(state, words, step=2_000_000):
    """Skips in steps that are too short for a jump."""
    for _ in range(words // step):
        state = skipped(state, step)
    return skipped(state, words % step)


@pytest.mark.parametrize("words", [624 * 32_001, 624 * 32_001 + 1, 50_000_000, 123_456_789])
def test_a_jump_equals_a_long_skip(instruction_set, words):
    start = drawn(1000).get_state()
    assert_bitwise(skipped(start, words), in_steps(start, words))


def test_a_jump_from_a_seeded_generator_equals_a_long_skip():
    start = torch.Generator().manual_seed(11).get_state()
    assert_bitwise(skipped(start, 30_000_000), in_steps(start, 30_000_000))


def test_a_repeated_distance_is_jumped_to_the_same_position():
    start = drawn(5).get_state()
    distance = 624 * 4_321 + 17
    by_twists = skipped(start, distance)
    for _ in range(2):  # the first jump computes the polynomial, the second finds it in the cache
        assert_bitwise(skipped(start, distance), by_twists)


def test_very_long_jumps_are_additive():
    start = drawn(100).get_state()
    far = skipped(start, 2**60 + 2**41)
    assert_bitwise(skipped(skipped(start, 2**60), 2**41), far)
    assert not torch.equal(far, start)


def test_a_negative_skip_raises():
    state = torch.Generator().get_state()
    with pytest.raises(ValueError, match=r"skip: .*words"):
        _core.skip(state.data_ptr(), -1)


def test_words_are_torchs_words(instruction_set):
    generator = drawn(600)
    state = generator.get_state()
    expected = torch.empty(700, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    # torch draws all 64 bits here; the range is one less, which only the draw 2**64 - 1 would show.
    assert_bitwise(next_words(state, 700), expected)
