"""RaggedShard by itself: what it refuses, what it is equal to, and whose units are whose."""

import copy
import io
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard

UNITS = st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any)


def refused(error, message):
    return pytest.raises(error, match=re.escape(message))


@pytest.mark.parametrize("dims", [(1,), (0, 2), (1, 0), (0, 0), (-1,), (0, 1, 3)])
def test_dims_that_are_no_leading_prefix_are_refused(dims):
    with refused(ValueError, f"of the leading dims in order, (0, 1, ..., k) or (), got {dims}"):
        RaggedShard(dims, (1, 1))


@pytest.mark.parametrize("units", [(1, -1), (-3,), ()])
def test_units_that_are_negative_or_missing_are_refused(units):
    with refused(ValueError, f"of one non-negative integer per rank of the axis, got {units}"):
        RaggedShard((0,), units)


def test_units_that_are_all_zero_are_refused():
    with refused(ValueError, "at least one positive number, got (0, 0)"):
        RaggedShard((0,), (0, 0))


@pytest.mark.parametrize("units", [(2, 0), (1, 1), (1, 0, 3)])
def test_one_whole_unit_has_one_owner(units):
    with refused(ValueError, f"1 for one rank and 0 for the others, got {units}"):
        RaggedShard((), units)


@pytest.mark.parametrize(("dims", "length"), [((0,), 0), ((0, 1), -1), ((), 1)])
def test_units_have_a_positive_length_along_their_dims(dims, length):
    with refused(
        ValueError, f"unit_length= of at least 1 with dims that are sharded, or None, got {length}"
    ):
        RaggedShard(dims, (1, 0), length)


def test_a_length_that_is_no_integer_is_refused():
    with refused(TypeError, "integers for unit_length, got (2.0,)"):
        RaggedShard((0,), (1, 1), 2.0)


def test_a_shorter_base_has_the_first_units_of_the_longest():
    """As of 7 rows on 2 ranks of tensor parallelism, 4 and 3, and of one expert and none."""
    rows = RaggedShard((0,), (1, 0, 1), 2)
    for length, expected in ((4, [(0, 2), (2, 2), (2, 4)]), (3, [(0, 2), (2, 2), (2, 3)]),
                             (2, [(0, 2), (2, 2), (2, 2)]), (0, [(0, 0)] * 3)):  # fmt: skip
        base = (length, 5)
        rows.check(base, 3)
        for rank, (start, stop) in enumerate(expected):
            assert rows.interval(base, rank) == range(5 * start, 5 * stop)
            assert rows.local_shape(base, rank) == (stop - start, 5)
            assert rows.first_row(base, rank) == start
    elements = RaggedShard((0, 1), (7, 5), 1)
    assert [elements.local_shape((2, 4, 3), rank) for rank in range(2)] == [(7, 3), (1, 3)]
    with refused(
        ValueError, "expected units for all 5 elements of dims (0,) of shape (5, 5), got 2"
    ):
        rows.check((5, 5), 3)


@pytest.mark.parametrize(
    ("dims", "units", "message"),
    [
        ((0.0,), (1, 1), "integers for dims, got (0.0,)"),
        ((0,), (1, 1.0), "integers for local_units, got (1, 1.0)"),
        ((0,), ("1",), "integers for local_units, got ('1',)"),
    ],
)
def test_arguments_that_are_no_integers_are_refused(dims, units, message):
    with refused(TypeError, message):
        RaggedShard(dims, units)


@pytest.mark.parametrize(
    ("placement", "shape", "axis_size", "message"),
    [
        (
            RaggedShard((0,), (1, 1)),
            (4,),
            3,
            "expected local_units= of one number for each of the 3 ranks of the mesh axis, got 2",
        ),
        (
            RaggedShard((0, 1), (1, 1)),
            (4,),
            2,
            "expected dims of the tensor, whose shape is (4,), got (0, 1)",
        ),
        (
            RaggedShard((0,), (1, 1)),
            (),
            2,
            "expected dims of the tensor, whose shape is (), got (0,)",
        ),
        (
            RaggedShard((0,), (1, 2)),
            (4, 3),
            2,
            "expected a number of units that divides 4, the elements of dims (0,) of shape (4, 3), "
            "got 3",
        ),
        (
            RaggedShard((0, 1), (2, 5)),
            (4, 3, 7),
            2,
            "expected a number of units that divides 12, the elements of dims (0, 1) of shape "
            "(4, 3, 7), got 7",
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, RaggedShard | tuple) else None,
)
def test_a_placement_that_does_not_fit_names_what_is_wrong(placement, shape, axis_size, message):
    with refused(ValueError, f"{placement!r}: {message}"):
        placement.check(shape, axis_size)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (7, 3)])
def test_a_placement_that_fits_is_let_pass(shape):
    RaggedShard((0,), (0, 1)).check(shape, 2)


def test_an_owner_beside_the_axis_is_refused():
    for owner in (-1, 2):
        with refused(
            ValueError, f"expected an owner from 0 to 1, the ranks of the axis, got {owner}"
        ):
            RaggedShard.owned_by(owner, 2)


def test_one_owner_holds_the_tensor_in_its_own_shape():
    placement = RaggedShard.owned_by(1, 3)
    assert placement == RaggedShard((), (0, 1, 0))
    assert placement.owner == 1
    assert [placement.local_shape((4, 3), rank) for rank in range(3)] == [(0, 3), (4, 3), (0, 3)]
    assert [placement.interval((4, 3), rank) for rank in range(3)] == [
        range(0),
        range(12),
        range(12, 12),
    ]


@pytest.mark.parametrize(
    ("units", "owner", "even"),
    [((1, 1), None, True), ((0, 3), 1, False), ((2, 3), None, False), ((4,), 0, True)],
)
def test_what_the_units_say(units, owner, even):
    placement = RaggedShard((0,), units)
    assert (placement.owner, placement.even, placement.total_units) == (owner, even, sum(units))


@given(units=UNITS, row=st.integers(1, 3), columns=st.integers(0, 4))
def test_intervals_follow_each_other_and_cover_the_base(units, row, columns):
    placement = RaggedShard((0,), units)
    shape = (sum(units) * row, columns)
    intervals = [placement.interval(shape, rank) for rank in range(len(units))]
    covered = [element for interval in intervals for element in interval]
    assert covered == list(range(shape[0] * columns))
    unit = placement.unit_size(shape)
    assert unit == row * columns
    assert [len(interval) for interval in intervals] == [count * unit for count in units]


@given(units=UNITS, a=st.integers(1, 3), b=st.integers(1, 3), c=st.integers(0, 3))
def test_a_local_tensor_has_one_dim_for_all_that_are_cut(units, a, b, c):
    shape = (sum(units) * a, b, c)
    for rank, count in enumerate(units):
        assert RaggedShard((0,), units).local_shape(shape, rank) == (count * a, b, c)
        assert RaggedShard((0, 1), units).local_shape(shape, rank) == (count * a * b, c)
        assert RaggedShard((0, 1, 2), units).local_shape(shape, rank) == (count * a * b * c,)


EQUAL = [
    (RaggedShard((0,), (1, 2)), RaggedShard([0], [1, 2])),
    (RaggedShard((0,), (1, 2)), RaggedShard(range(1), iter((1, 2)))),
]
DIFFERENT = [
    RaggedShard((0,), (1, 2)),
    RaggedShard((0,), (2, 1)),
    RaggedShard((0,), (2, 4)),
    RaggedShard((0, 1), (1, 2)),
    StridedRaggedShard((0,), (1, 2), 1),
    StridedRaggedShard((0,), (1, 2), 2),
    InterleavedShard(0, 2),
    Shard(0),
    Replicate(),
    ((0,), (1, 2)),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_placements_have_equal_hashes(one, other):
    assert one == other
    assert hash(one) == hash(other)


def test_different_placements_are_unequal_from_either_side():
    for n, one in enumerate(DIFFERENT):
        for m, other in enumerate(DIFFERENT):
            assert (one == other) is (n == m), (one, other)
    assert len(set(DIFFERENT)) == len(DIFFERENT)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda placement: pickle.loads(pickle.dumps(placement)),
}
PLACEMENTS = [RaggedShard((0, 1), (0, 3, 2)), RaggedShard.owned_by(2, 3)]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_copy_is_equal_and_works(placement, way):
    other = COPIES[way](placement)
    assert type(other) is RaggedShard
    assert other == placement
    assert hash(other) == hash(placement)
    assert [other.interval((5, 6), n) for n in range(3)] == [
        placement.interval((5, 6), n) for n in range(3)
    ]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_it_is_saved_and_loaded_with_weights_only(placement):
    file = io.BytesIO()
    torch.save({"placement": placement}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == {"placement": placement}


def test_its_repr_makes_it_again():
    placement = RaggedShard((0, 1), (0, 3, 2))
    assert repr(placement) == "RaggedShard(dims=(0, 1), local_units=(0, 3, 2))"
    assert eval(repr(placement)) == placement
    assert str(placement) == "Rg(0,1)(0,3,2)"
    source, names = placement.__fx_repr__()
    assert eval(source, dict(names)) == placement


def test_the_length_of_units_is_part_of_a_placement():
    placement = RaggedShard((0,), (2, 1), 3)
    assert placement != RaggedShard((0,), (2, 1))
    assert placement != RaggedShard((0,), (2, 1), 2)
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert eval(repr(placement)) == placement
    assert str(placement) == "Rg(0)(2,1)x3"
    strided = StridedRaggedShard((0,), (2, 1), 2, 3)
    assert pickle.loads(pickle.dumps(strided)) == strided != StridedRaggedShard((0,), (2, 1), 2)
    assert eval(repr(strided)) == strided
    assert str(strided) == "SRg(0)(2,1)x3/2"
    assert strided.with_units((0, 1), (4, 2), 1) == StridedRaggedShard((0, 1), (4, 2), 2, 1)


def test_other_units_of_the_same_kind():
    assert RaggedShard((0,), (1, 2)).with_units((0, 1), (4, 0)) == RaggedShard((0, 1), (4, 0))


def test_it_is_no_stock_placement():
    placement = RaggedShard((0,), (1, 2))
    assert not any((placement.is_shard(), placement.is_replicate(), placement.is_partial()))


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor, bool])
def test_arguments_of_other_integer_types_become_ints(integer):
    one, none = integer(1), integer(0)
    ragged = RaggedShard((none,), (one, none))
    assert ragged == RaggedShard((0,), (1, 0))
    assert {type(n) for n in (*ragged.dims, *ragged.local_units)} == {int}
