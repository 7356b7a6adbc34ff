"""Held-out samples: never in training, evenly spread, and with random values of their own."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integration.data import Digits, split
from integration.errors import UsageError


@dataclass
class Numbers:
    """Samples that are their slots."""

    count: int
    source = "numbers"
    size = 0
    fingerprint = ""
    tokenizer = None
    tokens = 1

    def __len__(self):
        return self.count

    def sample(self, slot, draw):
        assert 0 <= slot < self.count
        return {"slot": slot, "draw": draw}


@given(count=st.integers(2, 200), data=st.data())
def test_both_parts_together_are_all_samples_once(count, data):
    held_out = data.draw(st.integers(1, count // 2))
    parts = split(Numbers(count), held_out)
    training, others = (
        [part.sample(slot, 0)["slot"] for slot in range(len(part))]
        for part in (parts.training, parts.held_out)
    )
    assert len(others) == held_out
    assert training == sorted(training)
    assert sorted(training + others) == list(range(count))
    gaps = {after - before for before, after in pairwise(others)}
    assert gaps <= {count // held_out}


def test_without_held_out_samples_the_data_is_as_it_was():
    data = Numbers(5)
    parts = split(data, 0)
    assert parts.training is data
    assert parts.held_out is None


def test_held_out_digits_have_noise_of_their_own_which_is_always_the_same():
    data = Digits(0)
    held_out = split(data, 8).held_out
    first, again = held_out.sample(3, 3), held_out.sample(3, 3)
    every = len(data) // 8
    in_training = data.sample(4 * every - 1, 3)
    assert torch.equal(first["x"], in_training["x"])
    assert torch.equal(first["noise"], again["noise"])
    assert not torch.equal(first["noise"], in_training["noise"])


def test_more_than_half_of_the_samples_are_refused():
    with pytest.raises(UsageError, match=r"--eval-samples 6: expected at most half of the 11"):
        split(Numbers(11), 6)


def test_a_part_smaller_than_a_global_batch_is_refused():
    parts = split(Numbers(12), 4)
    parts.training.require(8)
    with pytest.raises(UsageError, match=r"--eval-samples 4: .* batch of 9 .* got 8 of 12"):
        parts.training.require(9)
