"""StridedRaggedShard by itself: its factor, and what it shares with RaggedShard."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch

from ragged_shard import RaggedShard, StridedRaggedShard

PLACEMENT = StridedRaggedShard((0, 1), (1, 0, 3), 2)


@pytest.mark.parametrize("factor", [0, -2])
def test_a_factor_below_one_is_refused(factor):
    with pytest.raises(ValueError, match=f"expected split_factor >= 1, got {factor}"):
        StridedRaggedShard((0,), (1, 1), factor)


@pytest.mark.parametrize("factor", [2.0, "2", None])
def test_a_factor_that_is_no_integer_is_refused(factor):
    with pytest.raises(TypeError, match=re.escape(f"an integer for split_factor, got {factor!r}")):
        StridedRaggedShard((0,), (1, 1), factor)


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((1,), (1, 1), "of the leading dims"),
        ((0,), (1, -1), "non-negative"),
        ((0,), (0, 0), "at least one positive number"),
        ((), (1, 1), "1 for one rank and 0 for the others"),
    ],
)
def test_dims_and_units_are_checked_as_those_of_ragged(dims, units, message):
    with pytest.raises(ValueError, match=message):
        StridedRaggedShard(dims, units, 2)


def test_the_factor_is_part_of_what_it_is():
    same = StridedRaggedShard((0, 1), (1, 0, 3), 2)
    assert same == PLACEMENT
    assert hash(same) == hash(PLACEMENT)
    assert StridedRaggedShard((0, 1), (1, 0, 3), 3) != PLACEMENT
    assert RaggedShard((0, 1), (1, 0, 3)) != PLACEMENT
    ragged: object = RaggedShard((0, 1), (1, 0, 3))
    assert same != ragged  # from the other side


@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, lambda placement: pickle.loads(pickle.dumps(placement))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_keeps_the_factor(way):
    other = way(PLACEMENT)
    assert type(other) is StridedRaggedShard
    assert other == PLACEMENT
    assert other.split_factor == 2


def test_it_is_saved_and_loaded_with_weights_only():
    file = io.BytesIO()
    torch.save(PLACEMENT, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == PLACEMENT


def test_its_repr_makes_it_again():
    text = "StridedRaggedShard(dims=(0, 1), local_units=(1, 0, 3), split_factor=2)"
    assert repr(PLACEMENT) == text
    assert eval(text) == PLACEMENT
    assert str(PLACEMENT) == "SRg(0,1)(1,0,3)/2"
    source, names = PLACEMENT.__fx_repr__()
    assert eval(source, dict(names)) == PLACEMENT


def test_other_units_keep_the_factor():
    assert PLACEMENT.with_units((0,), (2, 2)) == StridedRaggedShard((0,), (2, 2), 2)


def test_ranks_hold_of_the_base_what_ragged_gives_them():
    ragged = RaggedShard((0, 1), (1, 0, 3))
    for rank in range(3):
        assert PLACEMENT.interval((6, 4), rank) == ragged.interval((6, 4), rank)
        assert PLACEMENT.local_shape((6, 4), rank) == ragged.local_shape((6, 4), rank)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor, bool])
def test_a_factor_of_other_integer_types_becomes_one(integer):
    one, none = integer(1), integer(0)
    strided = StridedRaggedShard((none,), (one, none), one)
    assert strided == StridedRaggedShard((0,), (1, 0), 1)
    assert type(strided.split_factor) is int
