"""The boxes of a tensor that a rank has, and where it stores them, for any rank.

Placements on one axis have boxes in the coordinates of the same base, so two ranks exchange the
intersections of their boxes. A placement that shards a dim (Shard, _StridedShard, InterleavedShard)
selects index ranges of it, axis after axis. A ragged placement is applied last and selects a range
of the flattened base, which is a few boxes.
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
    """A strided view of a flat buffer, as `torch.as_strided` takes it.

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
        """The number of elements."""
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
    """A box of the base, and the window of the local tensor's flat storage with its elements."""

    box: TensorBox
    window: StorageWindow

    def window_of(self, box: TensorBox) -> StorageWindow:
        """Returns the window of a smaller box within this one."""
        skipped = (a - b for a, b in zip(box.offsets, self.box.offsets, strict=True))
        offset = sum(n * s for n, s in zip(skipped, self.window.strides, strict=True))
        return StorageWindow(box.sizes, self.window.strides, self.window.offset + offset)


@lru_cache(maxsize=65536)
def stored_boxes(
    placement: Placement, base: tuple[int, ...], axis_size: int, rank: int
) -> tuple[StoredBox, ...]:
    """Returns the boxes of the base that a rank of an axis has, in the order of its local storage.

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
    placement = _as_interleaved(placement)
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
    """Returns equal slices of a dim at a constant distance, which one local tensor stores."""
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
    """Returns the shape of a rank's local tensor."""
    if isinstance(placement, RaggedShard):
        return placement.local_shape(base, rank)
    placement = _as_interleaved(placement)
    if isinstance(placement, InterleavedShard):
        return placement.local_shape(base, axis_size, rank)
    return base


def _as_interleaved(placement: Placement) -> Placement:
    """Returns a Shard as an interleaved shard of one chunk; other placements unchanged."""
    return InterleavedShard(placement.dim, 1) if type(placement) is Shard else placement


def are_contiguous(windows: Sequence[StorageWindow]) -> bool:
    """Whether windows, in this order, cover a contiguous range from the start of the buffer."""
    position = 0
    for window in windows:
        if window.offset != position or not window.is_contiguous:
            return False
        position += window.numel
    return True


def _flat(box: TensorBox, strides: tuple[int, ...]) -> int:
    return sum(n * s for n, s in zip(box.offsets, strides, strict=True))


_SHARDS_A_DIM = (Shard, _StridedShard, InterleavedShard)
_Runs = tuple[range, ...]  # of one dim, ascending: the global indices of the local ones


def rank_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[TensorBox, ...]:
    """Returns the boxes of the global tensor that the rank at a coordinate of a mesh has.

    Args:
        shape: of the global tensor.
        mesh_shape: size of each axis.
        placements: one per axis, which `validation.check_fit` accepts.
        coordinate: one per axis.

    Returns:
        boxes by ascending offsets; none for an empty shard.

    Raises:
        ValueError: ragged units do not fit the base at this coordinate.
    """
    pieces = rank_stored_boxes(shape, mesh_shape, placements, coordinate)
    return tuple(sorted((piece.box for piece in pieces), key=lambda box: box.offsets))


def rank_stored_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[StoredBox, ...]:
    """Returns the boxes of `rank_boxes`, with their windows of the contiguous local tensor."""
    runs: list[_Runs] = [(range(size),) for size in shape]
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if isinstance(placement, _SHARDS_A_DIM):
            current = runs[placement.dim]
            selected = _index_ranges(placement, sum(map(len, current)), size, index)
            runs[placement.dim] = tuple(run for part in selected for run in _select(current, part))
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
        for global_box, offsets in _in_global(box, runs):
            offset = start + sum(n * s for n, s in zip(offsets, strides, strict=True))
            pieces.append(StoredBox(global_box, StorageWindow(global_box.sizes, strides, offset)))
        start += box.numel
    return tuple(pieces)


def normalized(placement: Placement, ndim: int) -> Placement:
    """Returns the placement with a positive dim, for a tensor of `ndim` dims."""
    if isinstance(placement, InterleavedShard):
        return placement.normalized(ndim)
    if type(placement) is Shard and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def replicates(placement: Placement) -> bool:
    """Whether all ranks of the axis have the same elements: copies, or terms of a sum."""
    return isinstance(placement, Replicate) or placement.is_partial()


def local_lengths(placement: Placement, length: int, axis_size: int) -> set[int]:
    """Returns the lengths of a dim's shards on the ranks of an axis, for a dim of this length."""
    return {
        sum(map(len, _index_ranges(placement, length, axis_size, index)))
        for index in range(axis_size)
    }


def _index_ranges(placement: Placement, length: int, axis_size: int, index: int) -> Iterator[range]:
    """Yields the index ranges of a dim of this length that a rank of the axis has."""
    chunks, unit = 1, 1
    if isinstance(placement, InterleavedShard):
        chunks, unit = placement.interleaves, placement.unit
    elif isinstance(placement, _StridedShard):
        chunks = int(placement.split_factor)
    for n in range(chunks):
        yield _chunk(_chunk(range(length), chunks, n), axis_size, index, unit)


def _chunk(part: range, count: int, index: int, unit: int = 1) -> range:
    """Returns one of `count` chunks, as `torch.chunk`; the last ones may be short or empty."""
    size = -(-len(part) // (count * unit)) * unit
    return part[size * index : size * (index + 1)]


def _select(runs: _Runs, positions: range) -> Iterator[range]:
    """Yields the indices at these positions, which count over all runs in order."""
    start = 0
    for run in runs:
        selected = run[max(positions.start - start, 0) : max(positions.stop - start, 0)]
        if selected:
            yield selected
        start += len(run)


def _in_global(box: TensorBox, runs: list[_Runs]) -> Iterator[tuple[TensorBox, tuple[int, ...]]]:
    """Yields a box of the base as boxes of the global tensor, with their offsets in it.

    There is one for each combination of the dims' runs.
    """
    parts_of_dims = []
    for of_dim, offset, size in zip(runs, box.offsets, box.sizes, strict=True):
        parts = list(_select(of_dim, range(offset, offset + size)))
        starts = itertools.accumulate(map(len, parts), initial=0)
        parts_of_dims.append(list(zip(parts, starts, strict=False)))
    for of_dims in itertools.product(*parts_of_dims):
        parts = [part for part, _ in of_dims]
        inner = TensorBox(tuple(part.start for part in parts), tuple(map(len, parts)))
        yield inner, tuple(start for _, start in of_dims)
