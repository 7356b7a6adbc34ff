"""Splits a local tensor into boxes, whose indices a CUDA kernel can compute by arithmetic.

Note [boxes]
    A kernel takes a few numbers per dim, not lists of pieces. Pieces of one length that are evenly
    spaced are one progression; a strided shard has one, and a second one for its last piece where
    that is shorter. A box is one progression per dim. With windows each window is a range of the
    elements of one box.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from dist_rng.regions.draw_strides import DrawDim, DrawStrides
from dist_rng.regions.region import IndexRange

MAX_DIMS = 8  # kMaxDims in src/cuda/fill_params.h


@dataclass(frozen=True)
class KernelBoxDim:
    """Index ``k`` of the dim is index ``k // length * period + k % length`` of the global dim."""

    size: int
    length: int
    period: int
    draw_stride: int
    local_stride: int


@dataclass(frozen=True)
class KernelBox:
    """Elements ``first <= position < first + count`` of a grid of ``dims``, the last fastest.

    Attributes:
        first: the first position.
        count: number of elements.
        draw: draw index of position 0.
        local: offset of position 0 in the local tensor's storage, in elements; negative where a
            window begins after it.
        dims: outermost first.
    """

    first: int
    count: int
    draw: int
    local: int
    dims: tuple[KernelBoxDim, ...]


@dataclass(frozen=True)
class _Progression:
    start: int  # its first index in the global dim
    local_start: int  # its first index in the local dim
    size: int
    length: int
    period: int


@lru_cache(maxsize=4096)
def boxes_of(layout: DrawStrides) -> tuple[KernelBox, ...]:
    """Returns boxes that contain each element of ``layout`` once."""
    longer = [dim for dim in layout.dims if dim.size != 1]
    start = sum(d.pieces[0].start * d.draw_stride for d in layout.dims if d.size == 1)
    dims = _joined(longer)
    progressions = [tuple(_progressions(dim.pieces)) for dim in dims]
    if len(dims) > MAX_DIMS or (layout.windows is not None and prod(map(len, progressions)) > 1):
        return tuple(_boxes_of_runs(layout))
    boxes = (_box(dims, chosen, start) for chosen in product(*progressions))
    if layout.windows is None:
        return tuple(boxes)
    return tuple(_windows(next(boxes), layout.windows))


def _box(dims: list[DrawDim], chosen: tuple[_Progression, ...], start: int) -> KernelBox:
    pairs = list(zip(dims, chosen, strict=True))
    return KernelBox(
        first=0,
        count=prod(part.size for part in chosen),
        draw=start + sum(part.start * dim.draw_stride for dim, part in pairs),
        local=sum(part.local_start * dim.local_stride for dim, part in pairs),
        dims=tuple(
            KernelBoxDim(part.size, part.length, part.period, dim.draw_stride, dim.local_stride)
            for dim, part in pairs
        ),
    )


def _windows(box: KernelBox, windows: tuple[IndexRange, ...]) -> Iterator[KernelBox]:
    packed = 0
    for window in windows:
        yield KernelBox(window.start, len(window), box.draw, packed - window.start, box.dims)
        packed += len(window)


def _boxes_of_runs(layout: DrawStrides) -> Iterator[KernelBox]:
    # Slow for many runs, but such layouts are rare: ragged shards of interleaved shards.
    for draw, count, local, stride in layout.grid().runs():
        yield KernelBox(0, count, draw, local, (KernelBoxDim(count, count, count, 1, stride),))


def _joined(dims: list[DrawDim]) -> list[DrawDim]:
    """Joins each dim with the next inner one where draws and local elements have no gap."""
    joined: list[DrawDim] = []
    for dim in dims:
        size = dim.size
        if (
            joined
            and joined[-1].draw_stride == size * dim.draw_stride
            and joined[-1].local_stride == size * dim.local_stride
        ):
            pieces = tuple(IndexRange(p.start * size, p.stop * size) for p in joined[-1].pieces)
            joined[-1] = DrawDim(pieces, dim.draw_stride, dim.local_stride)
        else:
            joined.append(dim)
    return joined


def _progressions(pieces: tuple[IndexRange, ...]) -> Iterator[_Progression]:
    local_start = 0
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
        period = period if count > 1 else length
        yield _Progression(pieces[0].start, local_start, size, length, period)
        local_start += size
        pieces = pieces[count:]
