"""What ranks hold under any placement of one axis: boxes of the base, windows of the storage."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.geometry.stored_boxes import (
    StorageWindow,
    StoredBox,
    are_contiguous,
    local_shape_on_axis,
    stored_boxes,
)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0] if number else [1, 2, 3]


@st.composite
def ragged(draw, shape, axis_size):
    dims = draw(st.integers(0, len(shape)))
    if not dims:
        return RaggedShard.owned_by(draw(st.integers(0, axis_size - 1)), axis_size)
    total = draw(st.sampled_from(divisors(math.prod(shape[:dims]))))
    cuts = sorted(
        draw(st.lists(st.integers(0, total), min_size=axis_size - 1, max_size=axis_size - 1))
    )
    units = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return draw(
        st.sampled_from(
            [RaggedShard(range(dims), units), StridedRaggedShard(range(dims), units, 2)]
        )
    )


@st.composite
def cases(draw):
    """A base, the size of an axis, and a placement of the base on it."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    axis_size = draw(st.integers(1, 4))
    dim = draw(st.integers(0, len(shape) - 1))
    interleaves = draw(st.sampled_from(divisors(shape[dim])))
    placement = draw(
        st.sampled_from([Replicate(), Shard(dim), InterleavedShard(dim, interleaves)])
        | ragged(shape, axis_size)
    )
    return shape, axis_size, placement


def expected_local(shape, placement, axis_size, rank):
    """The flat indices that a rank holds, as its local tensor, by way of torch's own operators."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    if isinstance(placement, RaggedShard):
        unit = numbers.numel() // sum(placement.local_units)
        parts = numbers.flatten().split([unit * count for count in placement.local_units])
        if not placement.dims:
            return parts[rank].reshape(shape if placement.owner == rank else (0, *shape[1:]))
        rows = math.prod(shape[: len(placement.dims)]) // sum(placement.local_units)
        rest = shape[len(placement.dims) :]
        return parts[rank].reshape(rows * placement.local_units[rank], *rest)
    if isinstance(placement, InterleavedShard):
        chunks = numbers.chunk(placement.interleaves, placement.dim)
        parts = [chunked(chunk, axis_size, placement.dim, rank) for chunk in chunks]
        return torch.cat(parts, placement.dim)
    if isinstance(placement, Shard):
        return chunked(numbers, axis_size, placement.dim, rank)
    return numbers


def chunked(tensor, count, dim, index):
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def of_box(box, shape):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return numbers[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]


def of_window(window, flat):
    return flat.clone().as_strided(window.sizes, window.strides, window.offset)


@given(cases())
def test_all_ranks_together_hold_every_element_once(case):
    shape, axis_size, placement = case
    found = [
        element
        for rank in range(axis_size)
        for piece in stored_boxes(placement, shape, axis_size, rank)
        for element in of_box(piece.box, shape).flatten().tolist()
    ]
    copies = axis_size if isinstance(placement, Replicate) else 1
    assert sorted(found) == sorted(list(range(math.prod(shape))) * copies)


@given(cases())
def test_windows_say_where_the_boxes_are_in_the_local_tensor(case):
    shape, axis_size, placement = case
    for rank in range(axis_size):
        local = expected_local(shape, placement, axis_size, rank)
        assert local_shape_on_axis(placement, shape, axis_size, rank) == tuple(local.shape)
        flat = local.contiguous().view(-1)
        pieces = stored_boxes(placement, shape, axis_size, rank)
        for piece in pieces:
            assert piece.box.numel == piece.window.numel > 0
            assert torch.equal(of_window(piece.window, flat), of_box(piece.box, shape))
        assert sum(piece.window.numel for piece in pieces) == flat.numel()


@given(cases(), st.data())
def test_the_window_of_a_smaller_box_is_within_that_of_the_piece(case, data):
    shape, axis_size, placement = case
    rank = data.draw(st.integers(0, axis_size - 1))
    flat = expected_local(shape, placement, axis_size, rank).contiguous().view(-1)
    for piece in stored_boxes(placement, shape, axis_size, rank):
        ends = [
            sorted((data.draw(st.integers(o, o + n - 1)), data.draw(st.integers(o, o + n - 1))))
            for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True)
        ]
        box = TensorBox(tuple(a for a, _ in ends), tuple(b - a + 1 for a, b in ends))
        assert torch.equal(of_window(piece.window_of(box), flat), of_box(box, shape))


def test_a_scalar_has_one_owner_and_one_piece():
    owned = RaggedShard.owned_by(1, 2)
    assert stored_boxes(owned, (), 2, 0) == ()
    assert stored_boxes(owned, (), 2, 1) == (
        StoredBox(TensorBox((), ()), StorageWindow((), (), 0)),
    )
    assert stored_boxes(Replicate(), (), 2, 0) == (
        StoredBox(TensorBox((), ()), StorageWindow((), (), 0)),
    )


@pytest.mark.parametrize(
    ("window", "is_contiguous"),
    [
        (StorageWindow((2, 3), (3, 1), 5), True),
        (StorageWindow((2, 3), (4, 1), 0), False),
        (StorageWindow((1, 3), (9, 1), 0), True),
        (StorageWindow((3, 1), (1, 7), 0), True),
        (StorageWindow((3,), (2,), 0), False),
        (StorageWindow((), (), 4), True),
    ],
)
def test_a_window_is_a_run_where_its_elements_follow_each_other(window, is_contiguous):
    assert window.is_contiguous is is_contiguous
    reached = torch.arange(64).as_strided(window.sizes, window.strides, window.offset).flatten()
    assert (
        reached.tolist() == list(range(window.offset, window.offset + window.numel))
    ) is is_contiguous


@pytest.mark.parametrize(
    ("windows", "one_run"),
    [
        ([], True),
        ([StorageWindow((2, 3), (3, 1), 0), StorageWindow((4,), (1,), 6)], True),
        ([StorageWindow((2, 3), (3, 1), 0), StorageWindow((4,), (1,), 7)], False),
        ([StorageWindow((4,), (1,), 6), StorageWindow((2, 3), (3, 1), 0)], False),
        ([StorageWindow((2, 3), (4, 1), 0)], False),
        ([StorageWindow((4,), (1,), 1)], False),
    ],
)  # fmt: skip
def test_windows_are_one_run_where_they_follow_each_other_from_the_beginning(windows, one_run):
    assert are_contiguous(windows) is one_run
