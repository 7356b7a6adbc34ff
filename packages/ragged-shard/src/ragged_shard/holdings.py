"""Which boxes of the base a rank of one axis holds under a placement, and where it stores them.

All placements of one axis are compared in the coordinates of the same base, so that what travels
between any two of them is the intersections of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.boxes import Box, boxes_of_run, contiguous_strides
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard


@dataclass(frozen=True, slots=True)
class Window:
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
    def is_run(self) -> bool:
        """Whether its elements lie one behind the other."""
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the base, and the window of the local tensor's flat storage that holds it."""

    box: Box
    window: Window

    def part(self, box: Box) -> Window:
        """The window of a smaller box within this one."""
        skipped = (a - b for a, b in zip(box.offsets, self.box.offsets, strict=True))
        offset = sum(n * s for n, s in zip(skipped, self.window.strides, strict=True))
        return Window(box.sizes, self.window.strides, self.window.offset + offset)


@lru_cache(maxsize=65536)
def held(
    placement: Placement, base: tuple[int, ...], axis_size: int, rank: int
) -> tuple[Piece, ...]:
    """What a rank of an axis holds of the base, in the order of its local storage.

    Args:
        placement: Replicate, Shard, or one of ours.
        base: shape of the base.
        axis_size: ranks on the axis.
        rank: index on the axis.
    """
    if isinstance(placement, RaggedShard):
        run = placement.interval(base, rank)
        strides = contiguous_strides(base)
        return tuple(
            Piece(box, Window(box.sizes, strides, _flat(box, strides) - run.start))
            for box in boxes_of_run(base, run.start, run.stop)
        )
    placement = _in_chunks(placement)
    if isinstance(placement, InterleavedShard):
        part = placement.piece(base, axis_size, rank)
        return _slabs(base, placement.dim, part, placement.interleaves, placement.chunk(base))
    assert isinstance(placement, Replicate), placement
    whole = Box((0,) * len(base), base)
    return (Piece(whole, Window(base, contiguous_strides(base), 0)),) if whole.numel else ()


def _slabs(
    base: tuple[int, ...], dim: int, part: range, count: int, distance: int
) -> tuple[Piece, ...]:
    """Equal slices of a dim, every so far, stored together in one tensor."""
    local = (*base[:dim], count * len(part), *base[dim + 1 :])
    sizes = (*base[:dim], len(part), *base[dim + 1 :])
    if 0 in sizes:
        return ()
    strides = contiguous_strides(local)
    pieces = []
    for index in range(count):
        offsets = tuple(index * distance + part.start if d == dim else 0 for d in range(len(base)))
        window = Window(sizes, strides, index * len(part) * strides[dim])
        pieces.append(Piece(Box(offsets, sizes), window))
    return tuple(pieces)


def held_shape(
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


def are_one_run(windows: Sequence[Window]) -> bool:
    """Whether windows, in this order, cover one run of the buffer from its beginning."""
    position = 0
    for window in windows:
        if window.offset != position or not window.is_run:
            return False
        position += window.numel
    return True


def _flat(box: Box, strides: tuple[int, ...]) -> int:
    return sum(n * s for n, s in zip(box.offsets, strides, strict=True))
