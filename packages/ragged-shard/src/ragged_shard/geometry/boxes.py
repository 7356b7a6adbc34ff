"""Boxes of a tensor, and the boxes that cover a range of its flattened elements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A rectangular part of a tensor: one offset and one size per dim.

    Attributes:
        offsets: of the first element.
        sizes: of each dim; 0 is allowed.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def intersect(self, other: TensorBox) -> TensorBox | None:
        """Returns the intersection with another box; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else TensorBox(starts, sizes)

    def shift(self, offsets: Sequence[int]) -> TensorBox:
        """Returns the box, moved by an offset of each dim."""
        moved = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
        return TensorBox(moved, self.sizes)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns torch's strides of a contiguous tensor, in elements; a size of 0 counts as 1."""
    steps = accumulate(
        (max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1
    )
    return tuple(reversed(list(steps))) if shape else ()


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> tuple[TensorBox, ...]:
    """Returns the boxes, in storage order, that cover elements start to stop of a flattened tensor.

    There are at most ``2 * ndim - 1``: partial rows at both ends for each dim, full rows between.

    Args:
        shape: of the tensor.
        start: first element, in row-major order.
        stop: one past the last.

    Returns:
        no box for an empty range; one box for a scalar's only element.
    """
    if stop <= start:
        return ()
    return tuple(_boxes(tuple(shape), start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    if not shape:
        yield TensorBox((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):  # within one row
        yield from _row(shape, first, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _row(shape, first, start - first * row, row)
        first += 1
    end = stop // row  # of the full rows
    if end > first:
        yield TensorBox((first, *(0,) * (len(shape) - 1)), (end - first, *shape[1:]))
    if stop % row:
        yield from _row(shape, end, 0, stop - end * row)


def _row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[TensorBox]:
    for box in _boxes(shape[1:], start, stop):
        yield TensorBox((index, *box.offsets), (1, *box.sizes))
