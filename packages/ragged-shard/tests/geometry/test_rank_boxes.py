"""What each rank holds, as boxes, against index tensors that torch's own operators cut."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from ragged_shard.geometry.stored_boxes import normalized, rank_boxes, rank_stored_boxes, replicates
from ragged_shard.geometry.validation import check_fit

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def stored(numbers, placements, mesh_shape, coordinate):
    """The indices of a rank's elements, in the order of its local tensor."""
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, InterleavedShard):
            chunks = numbers.chunk(placement.interleaves, placement.dim)
            dim, unit = placement.dim, placement.unit
            parts = [chunked(one.unflatten(dim, (-1, unit)), dim, size, index) for one in chunks]
            numbers = torch.cat(parts, dim).flatten(dim, dim + 1)
        elif isinstance(placement, _StridedShard):
            numbers = placement._split_tensor(numbers, size, with_padding=False)[0][index]
        elif isinstance(placement, Shard):
            numbers = chunked(numbers, placement.dim, size, index)
    for placement, index in zip(placements, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            unit = placement.unit_length or numbers.numel() // sum(placement.local_units)
            start = unit * sum(placement.local_units[:index])
            stop = start + unit * placement.local_units[index]
            numbers = numbers.flatten()[start:stop]
    return numbers.flatten().tolist()


def chunked(tensor, dim, count, index):
    parts = tensor.chunk(count, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def elements(boxes, shape):
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    return [
        number
        for box in boxes
        for number in numbers[
            tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        ]
        .flatten()
        .tolist()
    ]


@st.composite
def cases(draw):
    """A shape, a mesh of one or two axes, and placements that fit: at most one axis is ragged."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    placements = []
    for _ in mesh_shape:
        dim = draw(st.integers(0, len(shape) - 1))
        taken = any(getattr(p, "dim", None) == dim for p in placements)
        interleaved = any(isinstance(p, InterleavedShard) and p.dim == dim for p in placements)
        choices = [Replicate(), Partial()]
        if not interleaved:
            choices += [Shard(dim), _StridedShard(dim, split_factor=draw(st.integers(1, 3)))]
        if not taken:
            fitting = [n for n in (1, 2, 3) if shape[dim] % n == 0]
            interleaves = draw(st.sampled_from(fitting))
            units = [unit for unit in (1, 2) if shape[dim] // interleaves % unit == 0]
            choices.append(InterleavedShard(dim, interleaves, draw(st.sampled_from(units))))
        placements.append(draw(st.sampled_from(choices)))
    axis = draw(st.sampled_from([None, *range(len(mesh_shape))]))
    if axis is not None:
        placements[axis] = draw(ragged(shape, mesh_shape, placements, axis))
    return shape, mesh_shape, tuple(placements)


@st.composite
def ragged(draw, shape, mesh_shape, placements, axis):
    """Units that divide the base of an axis at every coordinate, or the longest base."""
    below = [*placements[:axis], R, *placements[axis + 1 :]]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    coordinates = itertools.product(*map(range, mesh_shape))
    sizes = [len(stored(numbers, below, mesh_shape, coordinate)) for coordinate in coordinates]
    of_longest = draw(st.booleans()) and max(sizes) > 0
    common = max(sizes) if of_longest else math.gcd(*sizes) or 4
    total = draw(st.sampled_from([n for n in range(1, common + 1) if common % n == 0]))
    count = mesh_shape[axis] - 1
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count, max_size=count)))
    units = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    return RaggedShard(range(len(shape)), units, max(sizes) // total if of_longest else None)


@given(cases())
def test_boxes_are_what_torch_would_cut(case):
    shape, mesh_shape, placements = case
    check_fit(shape, mesh_shape, placements)
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        boxes = rank_boxes(shape, mesh_shape, placements, coordinate)
        expected = stored(numbers, placements, mesh_shape, coordinate)
        assert sorted(elements(boxes, shape)) == sorted(expected)
        assert [box.offsets for box in boxes] == sorted(box.offsets for box in boxes)
        assert all(box.numel for box in boxes)
        pieces = rank_stored_boxes(shape, mesh_shape, placements, coordinate)
        assert sorted((piece.box for piece in pieces), key=lambda box: box.offsets) == list(boxes)
        local = torch.full((sum(box.numel for box in boxes),), -1)
        for piece in pieces:
            window, box = piece.window, piece.box
            values = numbers[
                tuple(slice(n, n + m) for n, m in zip(box.offsets, box.sizes, strict=True))
            ]
            local.as_strided(window.sizes, window.strides, window.offset).copy_(values)
        assert local.tolist() == expected


STRIDED = StridedRaggedShard((0, 1), (5, 7), 2)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements", "coordinate", "expected"),
    [
        ((6, 8), (2, 2), (STRIDED, S0), (1, 1), [[(4, 2), (1, 6)], [(5, 0), (1, 8)]]),
        ((12, 4), (2,), (InterleavedShard(0, 3),), (0,), [
            [(0, 0), (2, 4)], [(4, 0), (2, 4)], [(8, 0), (2, 4)],
        ]),
        ((9, 4), (2, 2), (_StridedShard(0, split_factor=2), S0), (1, 0), [[(3, 0), (2, 4)]]),
        ((2, 8), (2, 2), (RaggedShard((0,), (1, 1)), InterleavedShard(1, 2)), (1, 0), [
            [(1, 0), (1, 2)], [(1, 4), (1, 2)],
        ]),
        ((5,), (4,), (S0,), (3,), []),
        ((), (2,), (RaggedShard.owned_by(1, 2),), (0,), []),
        ((), (2,), (RaggedShard.owned_by(1, 2),), (1,), [[(), ()]]),
    ],
    ids=["strided", "interleaved", "native-strided", "ragged-inter", "empty", "other", "owner"],
)  # fmt: skip
def test_the_boxes_of_a_rank(shape, mesh_shape, placements, coordinate, expected):
    boxes = rank_boxes(shape, mesh_shape, placements, coordinate)
    assert [[box.offsets, box.sizes] for box in boxes] == expected


def test_units_that_do_not_fit_a_base_are_refused():
    placements = (RaggedShard((0,), (1, 3)), S1)
    with pytest.raises(ValueError, match=r"divides 6, the elements .*, got 4;"):
        rank_boxes((6, 8), (2, 2), placements, (0, 0))


def test_dims_may_count_from_the_end():
    assert normalized(Shard(-1), 3) == Shard(2)
    assert normalized(InterleavedShard(-2, 2), 3) == InterleavedShard(1, 2)
    assert normalized(STRIDED, 3) is STRIDED


@pytest.mark.parametrize(
    ("placement", "same"),
    [
        (R, True),
        (Partial("max"), True),
        (S0, False),
        (STRIDED, False),
        (InterleavedShard(0, 1), False),
    ],
)
def test_which_axes_hold_the_same_on_all_their_ranks(placement, same):
    assert replicates(placement) is same
