"""An offset stored in a CPU generator's state is read back, and changes no draw."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_rng.emulation.stored_offset import LARGEST_OFFSET, read_offset, write_offset


def generator_after(seed, draws):
    generator = torch.Generator().manual_seed(seed)
    torch.empty(draws, dtype=torch.int32).random_(generator=generator)
    return generator


@given(
    seed=st.integers(0, 2**64 - 1),
    draws=st.sampled_from([0, 1, 2, 396, 397, 398, 622, 623, 624, 625, 1247, 1248, 1249, 5000]),
    offset=st.integers(0, LARGEST_OFFSET // 4).map(lambda quarter: 4 * quarter),
)
def test_an_offset_is_read_back_and_does_not_change_cpu_draws(seed, draws, offset):
    generator, other = generator_after(seed, draws), generator_after(seed, draws)
    state = generator.get_state()
    write_offset(state, offset)
    generator.set_state(state)
    assert read_offset(generator.get_state()) == offset
    # Three blocks later every word that depends on the changed one has been drawn.
    for _ in range(4):
        expected = torch.empty(500, dtype=torch.int32).random_(generator=other)
        assert torch.empty(500, dtype=torch.int32).random_(generator=generator).equal(expected)


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, 2000])
def test_removing_the_offset_restores_the_state(draws):
    state = generator_after(3, draws).get_state()
    marked = state.clone()
    write_offset(marked, 400)
    assert not marked.equal(state)
    write_offset(marked, None)
    assert marked.equal(state)


def test_an_offset_replaces_another():
    state = generator_after(3, 10).get_state()
    for offset in (8, 0, LARGEST_OFFSET, 4):
        write_offset(state, offset)
        assert read_offset(state) == offset


def test_draws_within_the_block_preserve_the_offset_and_the_next_block_loses_it():
    generator = generator_after(3, 1)
    state = generator.get_state()
    write_offset(state, 44)
    generator.set_state(state)
    torch.empty(623, dtype=torch.int32).random_(generator=generator)
    assert read_offset(generator.get_state()) == 44
    torch.empty(1, dtype=torch.int32).random_(generator=generator)
    assert read_offset(generator.get_state()) is None


def test_seeding_again_resets_the_offset():
    generator = generator_after(3, 1)
    state = generator.get_state()
    write_offset(state, 44)
    generator.set_state(state)
    generator.manual_seed(3)
    assert read_offset(generator.get_state()) == 0


def test_states_of_used_generators_without_a_stored_offset_return_none():
    assert read_offset(generator_after(3, 1).get_state()) is None


def test_offsets_beyond_the_unused_bits_raise():
    with pytest.raises(OverflowError, match="emulated CUDA generator"):
        write_offset(generator_after(3, 1).get_state(), LARGEST_OFFSET + 4)
