"""Divides a tensor into a grid of few cells, whatever its size, which the renderers draw.

Rows are the leading dims, flattened, and columns are the last dim. A small tensor has one cell per
element. In a larger one every dim is cut where some holder changes, so that each cell is one
part's and no shard is too small to be seen; what room is left goes to the widest cells. So
pictures are not to scale, and their headings are indices. Where even that is too many cells, as
with hundreds of interleaved chunks, the grid has the first of them, which are as telling.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.parts import TensorParts

_Edges = tuple[int, ...]  # of the cells of one dim: where each begins, and the end


@dataclass(frozen=True)
class CellGrid:
    """A grid of cells. Empty for a tensor without elements.

    Attributes:
        drawn: the part of the tensor that the cells cover, from its beginning.
        edges: per dim, where each cell begins, and the end; a scalar has one dim of size 1.
        cells: row by row, the index of the part that holds all of it.
    """

    drawn: TensorBox
    edges: tuple[_Edges, ...]
    cells: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """Where each column begins."""
        return self.edges[-1][:-1]

    @property
    def headings(self) -> tuple[str, ...]:
        """Where each row begins: one number per leading dim."""
        leading = (of_dim[:-1] for of_dim in self.edges[:-1])
        return tuple(",".join(map(str, index)) for index in itertools.product(*leading))

    @property
    def scaled(self) -> bool:
        """Whether a cell may be more than one element."""
        return any(b - a > 1 for of_dim in self.edges for a, b in itertools.pairwise(of_dim))


def grid(tensor: TensorParts, max_rows: int, max_columns: int) -> CellGrid:
    """Computes the grid of a tensor's parts.

    Args:
        tensor: of a tensor of any number of dims.
        max_rows: of cells, at least 1.
        max_columns: of cells, at least 1.
    """
    shape = tensor.shape or (1,)
    if 0 in shape:
        return CellGrid(TensorBox((0,) * len(shape), shape), ((0,),) * len(shape), ())
    changes = [{0, size} for size in shape]
    for part in tensor.parts:
        for box in part.boxes:
            for of_dim, offset, size in zip(changes, box.offsets, box.sizes, strict=False):
                of_dim |= {offset, offset + size}
    edges = (*_edges(changes[:-1], max_rows), *_edges(changes[-1:], max_columns))
    columns = len(edges[-1]) - 1
    cells = [-1] * math.prod(len(of_dim) - 1 for of_dim in edges)
    for index, part in enumerate(tensor.parts):
        for box in part.boxes:
            for cell in _cells(box, edges):
                cells[cell] = index
    assert -1 not in cells, f"a cell of {tensor} is nobody's"
    rows = (tuple(cells[n : n + columns]) for n in range(0, len(cells), columns))
    drawn = TensorBox(
        (0,) * len(tensor.shape), tuple(of_dim[-1] for of_dim in edges if tensor.shape)
    )
    return CellGrid(drawn, edges, tuple(rows))


def _cells(box: TensorBox, edges: Sequence[_Edges]) -> Sequence[int]:
    """The numbers of the cells that a box covers."""
    box = (
        box if box.sizes else TensorBox((0,), (1,))
    )  # a scalar's has no dims, its only cell has one
    cells = [0]
    for of_dim, offset, size in zip(edges, box.offsets, box.sizes, strict=True):
        last = len(of_dim) - 1
        inside = range(
            min(bisect_left(of_dim, offset), last), min(bisect_left(of_dim, offset + size), last)
        )
        cells = [cell * last + n for cell in cells for n in inside]
    return cells


def _edges(changes: Sequence[set[int]], limit: int) -> tuple[_Edges, ...]:
    """Where to cut some dims so that they have at most `limit` cells together.

    Args:
        changes: per dim, the indices at which some box begins or ends, with 0 and the size.
        limit: cells, at least 1.
    """
    runs = [[range(a, b) for a, b in itertools.pairwise(sorted(of_dim))] for of_dim in changes]
    while (total := math.prod(map(len, runs))) > limit:
        longest = max(runs, key=len)
        room = limit * len(longest) // total  # what the other dims leave
        del longest[max(room, len(longest) // 2) :]
    cells = [[1] * len(of_dim) for of_dim in runs]
    # Several dims are rather shown as short as they can be, unless every element fits.
    if len(runs) > 1 and math.prod(max(of_dim) for of_dim in changes) > limit:
        return tuple(map(_cut, runs, cells))
    while (widest := _widest(runs, cells, limit)) is not None:
        cells[widest.dim][widest.run] += 1
    return tuple(map(_cut, runs, cells))


@dataclass(frozen=True)
class _RunIndex:
    """A run of a dim."""

    dim: int
    run: int


def _widest(
    runs: Sequence[Sequence[range]], cells: Sequence[Sequence[int]], limit: int
) -> _RunIndex | None:
    """The run with the widest cells, of those that may have one more; None where none may."""
    numbers = [sum(of_dim) for of_dim in cells]
    total = math.prod(numbers)
    found, widest = None, 1.0
    for dim, (of_dim, counts) in enumerate(zip(runs, cells, strict=True)):
        if total // numbers[dim] * (numbers[dim] + 1) > limit:
            continue
        for n, (run, count) in enumerate(zip(of_dim, counts, strict=True)):
            if len(run) / count > widest:
                found, widest = _RunIndex(dim, n), len(run) / count
    return found


def _cut(runs: Sequence[range], cells: Sequence[int]) -> _Edges:
    """Each run cut into its number of cells."""
    starts = (
        run.start + len(run) * n // count
        for run, count in zip(runs, cells, strict=True)
        for n in range(count)
    )
    return (*starts, runs[-1].stop)
