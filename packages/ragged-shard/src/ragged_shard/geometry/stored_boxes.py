"""Which boxes of a tensor a rank holds, and where it stores them: arithmetic for any rank.

Placements of one axis are compared in the coordinates of the same base, so that what two ranks
exchange is the intersections of boxes. A placement that shards one dim (Shard, _StridedShard,
InterleavedShard) selects some runs of it, axis after axis. A ragged one comes last and selects a
run of the flat base, which is a few boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard.geometry.boxes import TensorBox, boxes_of_run, contiguous_strides
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard


@dataclass(frozen=True, slots=True)
class StorageWindow:
    """A strided view of a flat buffer: what `torch.as_strided` takes.

    Attributes:
        sizes: of the view.
        strides: in elements.
        offset: of its first element.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements in the view."""
        return math.prod(self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are contiguous."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of the base, and the window of the local tensor's flat storage that holds it."""

    box: TensorBox
    window: StorageWindow

    def window_of(self, box: TensorBox) -> StorageWindow:
        """The window of a smaller box within this one."""
        skipped = (a - b for a, b in zip(box.offsets, self.box.offsets, strict=True))
        offset = sum(n * s for n, s in zip(skipped, self.window.strides, strict=True))
        return StorageWindow(box.sizes, self.window.strides, self.window.offset + offset)


@lru_cache(maxsize=65536)
def stored_boxes(
    placement: Placement, base: tuple[int, ...], axis_size: int, rank: int
) -> tuple[StoredBox, ...]:
    """What a rank of an axis holds of the base, in the order of its local storage.

    Args:
        placement: Replicate, Shard, or one of this package.
        base: shape of the base.
        axis_size: ranks on the axis.
        rank: index on the axis.
    """
    if isinstance(placement, RaggedShard):
        run = placement.interval(base, rank)
        strides = contiguous_strides(base)
        return tuple(
            StoredBox(box, StorageWindow(box.sizes, strides, _flat(box, strides) - run.start))
            for box in boxes_of_run(base, run.start, run.stop)
        )
    placement = _in_chunks(placement)
    if isinstance(placement, InterleavedShard):
        part = placement.piece(base, axis_size, rank)
        return _slabs(base, placement.dim, part, placement.interleaves, placement.chunk(base))
    assert isinstance(placement, Replicate), placement
    whole = TensorBox((0,) * len(base), base)
    return (
        (StoredBox(whole, StorageWindow(base, contiguous_strides(base), 0)),) if whole.numel else ()
    )


def _slabs(
    base: tuple[int, ...], dim: int, part: range, count: int, distance: int
) -> tuple[StoredBox, ...]:
    """Equal slices of a dim, every so far, stored together in one tensor."""
    local = (*base[:dim], count * len(part), *base[dim + 1 :])
    sizes = (*base[:dim], len(part), *base[dim + 1 :])
    if 0 in sizes:
        return ()
    strides = contiguous_strides(local)
    pieces = []
    for index in range(count):
        offsets = tuple(index * distance + part.start if d == dim else 0 for d in range(len(base)))
        window = StorageWindow(sizes, strides, index * len(part) * strides[dim])
        pieces.append(StoredBox(TensorBox(offsets, sizes), window))
    return tuple(pieces)


def local_shape_on_axis(
    placement: Placement, base: tuple[int, ...], axis_size: int, rank: int
) -> tuple[int, ...]:
    """The shape of a rank's local tensor."""
    if isinstance(placement, RaggedShard):
        return placement.local_shape(base, rank)
    placement = _in_chunks(placement)
    if isinstance(placement, InterleavedShard):
        return placement.local_shape(base, axis_size, rank)
    return base


def _in_chunks(placement: Placement) -> Placement:
    """A Shard as what it is, an interleaved shard of one chunk; others as they are."""
    return InterleavedShard(placement.dim, 1) if type(placement) is Shard else placement


def are_contiguous(windows: Sequence[StorageWindow]) -> bool:
    """Whether windows, in this order, cover one run of the buffer from its beginning."""
    position = 0
    for window in windows:
        if window.offset != position or not window.is_contiguous:
            return False
        position += window.numel
    return True


def _flat(box: TensorBox, strides: tuple[int, ...]) -> int:
    return sum(n * s for n, s in zip(box.offsets, strides, strict=True))


_CUTS_A_DIM = (Shard, _StridedShard, InterleavedShard)
_Runs = tuple[range, ...]  # of one dim, ascending: the global indices behind the local ones


def rank_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[TensorBox, ...]:
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
    pieces = rank_stored_boxes(shape, mesh_shape, placements, coordinate)
    return tuple(sorted((piece.box for piece in pieces), key=lambda box: box.offsets))


def rank_stored_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[StoredBox, ...]:
    """The boxes of `rank_boxes`, and where the rank's contiguous local tensor has each of them."""
    runs: list[_Runs] = [(range(size),) for size in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, _CUTS_A_DIM):
            current = runs[placement.dim]
            wanted = _wanted(placement, sum(map(len, current)), size, index)
            runs[placement.dim] = tuple(run for part in wanted for run in _take(current, part))
    base = tuple(sum(map(len, of_dim)) for of_dim in runs)
    local: tuple[TensorBox, ...] = (TensorBox((0,) * len(base), base),)
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
            pieces.append(StoredBox(found, StorageWindow(found.sizes, strides, offset)))
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


def local_lengths(placement: Placement, length: int, axis_size: int) -> set[int]:
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
    """The runs at these positions, counted over all runs in order."""
    start = 0
    for run in runs:
        found = run[max(wanted.start - start, 0) : max(wanted.stop - start, 0)]
        if found:
            yield found
        start += len(run)


def _in_global(box: TensorBox, runs: list[_Runs]) -> Iterator[tuple[TensorBox, tuple[int, ...]]]:
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
        inner = TensorBox(tuple(part.start for part in parts), tuple(map(len, parts)))
        yield inner, tuple(start for _, start in of_dims)
