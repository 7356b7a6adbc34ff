"""The boxes of a tensor that a rank holds: arithmetic on shapes and placements, for any rank.

A placement that cuts one dim (Shard, _StridedShard, InterleavedShard) leaves some runs of it, axis
after axis. A ragged one comes last and takes a run of the flat base, which is a few boxes, and each
of those is a few boxes of the global tensor where the base consists of several runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard.boxes import Box, boxes_of_run, contiguous_strides
from ragged_shard.holdings import Piece, Window
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard

_CUTS_A_DIM = (Shard, _StridedShard, InterleavedShard)
_Runs = tuple[range, ...]  # of one dim, ascending: the global indices behind the local ones


def rank_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[Box, ...]:
    """What the rank at a coordinate of a mesh holds.

    Args:
        shape: of the global tensor.
        mesh_shape: size of each axis.
        placements: one per axis, that fit.py's `check_fit` lets pass.
        coordinate: one per axis.

    Returns:
        Boxes of the global tensor, by ascending offsets; none for an empty shard.

    Raises:
        ValueError: ragged units that do not fit the base at this coordinate.
    """
    pieces = rank_pieces(shape, mesh_shape, placements, coordinate)
    return tuple(sorted((piece.box for piece in pieces), key=lambda box: box.offsets))


def rank_pieces(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[Piece, ...]:
    """The boxes of `rank_boxes`, and where the rank's contiguous local tensor has each of them."""
    runs: list[_Runs] = [(range(size),) for size in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, _CUTS_A_DIM):
            held = runs[placement.dim]
            wanted = _wanted(placement, sum(map(len, held)), size, index)
            runs[placement.dim] = tuple(run for part in wanted for run in _take(held, part))
    base = tuple(sum(map(len, of_dim)) for of_dim in runs)
    local: tuple[Box, ...] = (Box((0,) * len(base), base),)
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            placement.check(base, size)
            interval = placement.interval(base, index)
            local = boxes_of_run(base, interval.start, interval.stop)
    pieces, start = [], 0
    for box in local:
        strides = contiguous_strides(box.sizes)
        for found, offsets in _in_global(box, runs):
            offset = start + sum(n * s for n, s in zip(offsets, strides, strict=True))
            pieces.append(Piece(found, Window(found.sizes, strides, offset)))
        start += box.numel
    return tuple(pieces)


def normalized(placement: Placement, ndim: int) -> Placement:
    """The placement with a positive dim, for a tensor of so many dims."""
    if isinstance(placement, InterleavedShard):
        return placement.normalized(ndim)
    if type(placement) is Shard and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def replicates(placement: Placement) -> bool:
    """Whether all ranks of the axis hold the same elements: copies, or terms of them."""
    return isinstance(placement, Replicate) or placement.is_partial()


def held_lengths(placement: Placement, length: int, axis_size: int) -> set[int]:
    """How much of a dim of this length the ranks of an axis hold, where a placement cuts it."""
    return {
        sum(map(len, _wanted(placement, length, axis_size, index))) for index in range(axis_size)
    }


def _wanted(placement: Placement, length: int, axis_size: int, index: int) -> Iterator[range]:
    """The parts of a dim of this length that a rank of the axis holds."""
    chunks = 1
    if isinstance(placement, InterleavedShard):
        chunks = placement.interleaves
    elif isinstance(placement, _StridedShard):
        chunks = int(placement.split_factor)
    for n in range(chunks):
        yield _chunk(_chunk(range(length), chunks, n), axis_size, index)


def _chunk(part: range, count: int, index: int) -> range:
    """One of so many chunks, as `torch.chunk` cuts them; the last may be short or empty."""
    size = -(-len(part) // count)
    return part[size * index : size * (index + 1)]


def _take(runs: _Runs, wanted: range) -> Iterator[range]:
    """What lies at these positions of the runs, put one behind the other."""
    start = 0
    for run in runs:
        found = run[max(wanted.start - start, 0) : max(wanted.stop - start, 0)]
        if found:
            yield found
        start += len(run)


def _in_global(box: Box, runs: list[_Runs]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """A box of the base as boxes of the global tensor, and where each begins in the first.

    There is one for every run of every dim.
    """
    found = []
    for of_dim, offset, size in zip(runs, box.offsets, box.sizes, strict=True):
        parts = list(_take(of_dim, range(offset, offset + size)))
        starts = itertools.accumulate(map(len, parts), initial=0)
        found.append(list(zip(parts, starts, strict=False)))
    for of_dims in itertools.product(*found):
        parts = [part for part, _ in of_dims]
        inner = Box(tuple(part.start for part in parts), tuple(map(len, parts)))
        yield inner, tuple(start for _, start in of_dims)
