"""Boxes, and the boxes that make up a run of a flattened tensor."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragged_shard.geometry.boxes import TensorBox, boxes_of_run, contiguous_strides

SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


@st.composite
def runs(draw):
    """A shape of up to five dims, and a run of its elements."""
    shape = draw(st.lists(st.integers(1, 4), max_size=5).map(tuple))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes(draw, ndim):
    ends = [draw(st.tuples(st.integers(0, 5), st.integers(0, 4))) for _ in range(ndim)]
    return TensorBox(tuple(start for start, _ in ends), tuple(size for _, size in ends))


def elements(box, shape):
    """Flat indices of a box's elements, in its own row-major order."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    return numbers[index].flatten().tolist()


def points(box):
    return set(
        itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)))
    )


@given(runs())
def test_the_boxes_of_a_run_cover_it_once_and_in_order(run):
    shape, start, stop = run
    found = boxes_of_run(shape, start, stop)
    covered = [element for box in found for element in elements(box, shape)]
    assert covered == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert all(box.numel for box in found)


@given(SHAPES, st.integers(0, 5))
def test_an_empty_run_has_no_boxes(shape, start):
    assert boxes_of_run(shape, start, start) == ()


def test_a_scalar_is_one_box():
    assert boxes_of_run((), 0, 1) == (TensorBox((), ()),)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((4, 3), 0, 12, [TensorBox((0, 0), (4, 3))]),
        ((4, 3), 3, 9, [TensorBox((1, 0), (2, 3))]),
        ((4, 3), 4, 5, [TensorBox((1, 1), (1, 1))]),
        ((4, 3), 1, 11, [
            TensorBox((0, 1), (1, 2)), TensorBox((1, 0), (2, 3)), TensorBox((3, 0), (1, 2)),
        ]),
        ((2, 2, 2), 1, 7, [
            TensorBox((0, 0, 1), (1, 1, 1)), TensorBox((0, 1, 0), (1, 1, 2)),
            TensorBox((1, 0, 0), (1, 1, 2)), TensorBox((1, 1, 0), (1, 1, 1)),
        ]),
        ((5,), 2, 4, [TensorBox((2,), (2,))]),
    ],
)  # fmt: skip
def test_whole_rows_are_one_box_and_partial_rows_others(shape, start, stop, expected):
    assert list(boxes_of_run(shape, start, stop)) == expected


@given(st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes(ndim), boxes(ndim))))
def test_the_common_part_of_two_boxes_is_that_of_their_points(pair):
    one, other = pair
    common = one.intersect(other)
    wanted = points(one) & points(other)
    assert (points(common) if common else set()) == wanted
    assert other.intersect(one) == common
    assert common is None or common.numel == len(wanted)


@given(st.integers(0, 3).flatmap(boxes), st.integers(0, 9))
def test_a_shifted_box_has_its_sizes(box, by):
    moved = box.shift((by,) * len(box.sizes))
    assert moved.sizes == box.sizes
    assert moved.offsets == tuple(offset + by for offset in box.offsets)


@given(SHAPES)
def test_strides_are_those_of_a_contiguous_tensor(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()
