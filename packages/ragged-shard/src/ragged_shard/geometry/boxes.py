"""Boxes of a tensor, and the boxes that make up a run of its flattened elements. Pure."""

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
        sizes: may hold zeros.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)

    def intersect(self, other: TensorBox) -> TensorBox | None:
        """The common part, or None where there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else TensorBox(starts, sizes)

    def shift(self, offsets: Sequence[int]) -> TensorBox:
        """The box moved by so much."""
        moved = tuple(a + b for a, b in zip(self.offsets, offsets, strict=True))
        return TensorBox(moved, self.sizes)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor (torch's: a size of 0 counts as 1)."""
    steps = accumulate(
        (max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1
    )
    return tuple(reversed(list(steps))) if shape else ()


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> tuple[TensorBox, ...]:
    """The boxes, in storage order, that make up elements start to stop of a flattened tensor.

    At most ``2 * ndim - 1`` of them: partial rows at both ends, level by level, whole rows between.

    Args:
        shape: of the tensor.
        start: first element, in row-major order.
        stop: one past the last.

    Returns:
        None at all for an empty run; one box for a scalar's only element.
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
    whole = stop // row
    if whole > first:
        yield TensorBox((first, *(0,) * (len(shape) - 1)), (whole - first, *shape[1:]))
    if stop % row:
        yield from _row(shape, whole, 0, stop - whole * row)


def _row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[TensorBox]:
    for box in _boxes(shape[1:], start, stop):
        yield TensorBox((index, *box.offsets), (1, *box.sizes))
