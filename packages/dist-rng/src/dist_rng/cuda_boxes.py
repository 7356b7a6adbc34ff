"""Cuts a local tensor into boxes that a CUDA kernel can count by arithmetic alone.

Note [boxes]
    A kernel has room for a few numbers per dim, not for lists of pieces. Pieces of one length,
    evenly spaced, are one progression; a strided shard has one, and a second for its last piece
    where that is shorter. A box is one progression per dim. With windows each is a range of one
    box's elements.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from dist_rng.layout import Layout, LayoutDim
from dist_rng.region import Piece

MAX_DIMS = 8  # kJobDims in src/cuda/job.h


@dataclass(frozen=True)
class BoxDim:
    """Index ``k`` of the dim lies at ``k // length * period + k % length`` of the global dim."""

    size: int
    length: int
    period: int
    draw_stride: int
    local_stride: int


@dataclass(frozen=True)
class Box:
    """Elements ``first <= position < first + count`` of a grid of ``dims``, the last fastest.

    Attributes:
        first: the first position.
        count: number of elements.
        draw: draw index of position 0.
        local: place of position 0 in the local tensor's storage, in elements; below zero where
            a window begins after it.
        dims: outermost first.
    """

    first: int
    count: int
    draw: int
    local: int
    dims: tuple[BoxDim, ...]


@dataclass(frozen=True)
class _Progression:
    start: int  # its first index in the global dim
    held: int  # indices of the local dim before it
    size: int
    length: int
    period: int


@lru_cache(maxsize=4096)
def boxes_of(layout: Layout) -> tuple[Box, ...]:
    """Return boxes that hold each element of ``layout`` once."""
    kept = [dim for dim in layout.dims if dim.size != 1]
    start = sum(d.pieces[0].start * d.draw_stride for d in layout.dims if d.size == 1)
    dims = _joined(kept)
    progressions = [tuple(_progressions(dim.pieces)) for dim in dims]
    if len(dims) > MAX_DIMS or (layout.windows is not None and prod(map(len, progressions)) > 1):
        return tuple(_boxes_of_runs(layout))
    boxes = (_box(dims, chosen, start) for chosen in product(*progressions))
    if layout.windows is None:
        return tuple(boxes)
    return tuple(_windows(next(boxes), layout.windows))


def _box(dims: list[LayoutDim], chosen: tuple[_Progression, ...], start: int) -> Box:
    pairs = list(zip(dims, chosen, strict=True))
    return Box(
        first=0,
        count=prod(part.size for part in chosen),
        draw=start + sum(part.start * dim.draw_stride for dim, part in pairs),
        local=sum(part.held * dim.local_stride for dim, part in pairs),
        dims=tuple(
            BoxDim(part.size, part.length, part.period, dim.draw_stride, dim.local_stride)
            for dim, part in pairs
        ),
    )


def _windows(box: Box, windows: tuple[Piece, ...]) -> Iterator[Box]:
    held = 0
    for window in windows:
        yield Box(window.start, len(window), box.draw, held - window.start, box.dims)
        held += len(window)


def _boxes_of_runs(layout: Layout) -> Iterator[Box]:
    # Slow where there are many, but such layouts are odd: ragged shards of interleaved ones.
    for draw, count, local, stride in layout.grid().runs():
        yield Box(0, count, draw, local, (BoxDim(count, count, count, 1, stride),))


def _joined(dims: list[LayoutDim]) -> list[LayoutDim]:
    """Join each dim with the next inner one where draws and places go on without a gap."""
    joined: list[LayoutDim] = []
    for dim in dims:
        size = dim.size
        if (
            joined
            and joined[-1].draw_stride == size * dim.draw_stride
            and joined[-1].local_stride == size * dim.local_stride
        ):
            pieces = tuple(Piece(p.start * size, p.stop * size) for p in joined[-1].pieces)
            joined[-1] = LayoutDim(pieces, dim.draw_stride, dim.local_stride)
        else:
            joined.append(dim)
    return joined


def _progressions(pieces: tuple[Piece, ...]) -> Iterator[_Progression]:
    held = 0
    while pieces:
        length = len(pieces[0])
        period = pieces[1].start - pieces[0].start if len(pieces) > 1 else length
        count = 1
        while (
            count < len(pieces)
            and len(pieces[count]) == length
            and pieces[count].start == pieces[0].start + count * period
        ):
            count += 1
        size = count * length
        yield _Progression(pieces[0].start, held, size, length, period if count > 1 else length)
        held += size
        pieces = pieces[count:]
