"""InterleavedShard by itself: what it refuses, what it is equal to, and whose rows are whose."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from ragged_shard import InterleavedShard

PLACEMENT = InterleavedShard(1, 3)


@pytest.mark.parametrize("interleaves", [0, -1])
def test_fewer_than_one_chunk_is_refused(interleaves):
    with pytest.raises(ValueError, match=f"expected interleaves >= 1, got {interleaves}"):
        InterleavedShard(0, interleaves)


def test_a_unit_below_one_is_refused():
    with pytest.raises(ValueError, match="expected unit >= 1, got 0"):
        InterleavedShard(0, 1, unit=0)


@pytest.mark.parametrize("value", [1.0, "1", None])
@pytest.mark.parametrize("name", ["dim", "interleaves", "unit"])
def test_arguments_that_are_no_integers_are_refused(name, value):
    arguments = {"dim": 0, "interleaves": 2} | {name: value}
    with pytest.raises(TypeError, match=re.escape(f"an integer for {name}, got {value!r}")):
        InterleavedShard(**arguments)


@pytest.mark.parametrize(
    ("placement", "shape", "message"),
    [
        (
            InterleavedShard(2, 1),
            (4, 4),
            "expected a dim of the tensor, whose shape is (4, 4), got 2",
        ),
        (InterleavedShard(0, 1), (), "expected a dim of the tensor, whose shape is (), got 0"),
        (
            InterleavedShard(-1, 2),
            (4,),
            "expected a dim of the tensor, whose shape is (4,), got -1",
        ),
        (
            InterleavedShard(1, 3),
            (3, 8),
            "expected a number of chunks that divides 8, the size of dim 1, got 3",
        ),
        (
            InterleavedShard(0, 2, unit=4),
            (12, 8),
            "expected a unit that divides 6, the size of a chunk of dim 0, got 4",
        ),
    ],
    ids=str,
)
def test_a_placement_that_does_not_fit_names_what_is_wrong(placement, shape, message):
    with pytest.raises(ValueError, match=re.escape(f"{placement!r}: {message}")):
        placement.check(shape)


@pytest.mark.parametrize("shape", [(2, 9), (0, 3), (2, 0)])
def test_a_placement_that_fits_is_let_pass(shape):
    PLACEMENT.check(shape)


def test_a_negative_dim_counts_from_the_end():
    assert InterleavedShard(-1, 3).normalized(2) == PLACEMENT
    assert PLACEMENT.normalized(2) is PLACEMENT


def test_dim_and_chunks_are_what_it_is():
    assert InterleavedShard(1, 3) == PLACEMENT
    assert hash(InterleavedShard(1, 3)) == hash(PLACEMENT)
    others = (InterleavedShard(0, 3), InterleavedShard(1, 2), InterleavedShard(1, 3, 2))
    for other in (*others, Shard(1), (1, 3)):
        assert other != PLACEMENT
        assert len({PLACEMENT, other}) == 2


@pytest.mark.parametrize(
    "way",
    [copy.copy, copy.deepcopy, lambda placement: pickle.loads(pickle.dumps(placement))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_equal(way):
    other = way(PLACEMENT)
    assert type(other) is InterleavedShard
    assert other == PLACEMENT


def test_it_is_saved_and_loaded_with_weights_only():
    file = io.BytesIO()
    torch.save(PLACEMENT, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == PLACEMENT


def test_its_repr_makes_it_again():
    assert repr(PLACEMENT) == "InterleavedShard(dim=1, interleaves=3)"
    assert eval(repr(PLACEMENT)) == PLACEMENT
    assert str(PLACEMENT) == "IS(1,3)"
    of_units = InterleavedShard(1, 3, unit=4)
    assert eval(repr(of_units)) == of_units
    assert str(of_units) == "IS(1,3x4)"
    assert pickle.loads(pickle.dumps(of_units)) == of_units
    assert InterleavedShard(-1, 3, unit=4).normalized(2) == of_units
    source, names = PLACEMENT.__fx_repr__()
    assert eval(source, dict(names)) == PLACEMENT


@given(
    chunks=st.integers(1, 4),
    units=st.integers(0, 7),
    unit=st.integers(1, 3),
    others=st.integers(0, 3),
    axis_size=st.integers(1, 5),
    dim=st.integers(0, 1),
)
def test_the_units_of_each_chunk_are_cut_as_torch_cuts_them(
    chunks, units, unit, others, axis_size, dim
):
    chunk = units * unit
    shape = (chunks * chunk, others) if dim == 0 else (others, chunks * chunk)
    placement = InterleavedShard(dim, chunks, unit)
    indices = torch.arange(chunk).view(units, unit)
    expected = [part.flatten().tolist() for part in indices.chunk(axis_size)]
    expected += [[]] * (axis_size - len(expected))
    for rank in range(axis_size):
        assert list(placement.piece(shape, axis_size, rank)) == expected[rank]
        local = list(shape)
        local[dim] = chunks * len(expected[rank])
        assert placement.local_shape(shape, axis_size, rank) == tuple(local)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor, bool])
def test_arguments_of_other_integer_types_become_ints(integer):
    one, none = integer(1), integer(0)
    interleaved = InterleavedShard(none, one)
    assert interleaved == InterleavedShard(0, 1)
    assert {type(interleaved.dim), type(interleaved.interleaves)} == {int}
