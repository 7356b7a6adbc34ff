"""How torch cuts a tensor along mesh axes: `torch.chunk` along each in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Piece", "numel", "piece_at", "shape_of"]

# Of a tensor, a slice in every dim.
Piece = tuple[slice, ...]


def piece_at(shape: Sequence[int], cuts: Sequence[tuple[int, int]], position: int) -> Piece:
    """The slices of one rank's piece.

    Args:
        shape: of what is cut.
        cuts: the dim that is cut and the ranks along the axis, in the order of the axes.
        position: the rank's, row-major over the axes.
    """
    coordinate = []
    for _, count in reversed(cuts):
        position, index = divmod(position, count)
        coordinate.append(index)
    bounds = [(0, size) for size in shape]
    for (dim, count), index in zip(cuts, reversed(coordinate), strict=True):
        begin, end = bounds[dim]
        whole = math.ceil((end - begin) / count)
        first = min(begin + whole * index, end)
        bounds[dim] = (first, min(first + whole, end))
    return tuple(slice(*bound) for bound in bounds)


def shape_of(piece: Piece) -> list[int]:
    """The sizes of a piece."""
    return [one.stop - one.start for one in piece]


def numel(piece: Piece) -> int:
    """The elements of a piece."""
    return math.prod(shape_of(piece))
