"""Divides a tensor of any size into a grid of few cells, which the renderers draw.

Rows are the leading dims, flattened, and columns are the last dim. A small tensor has one cell per
element. In a larger one every dim is divided where the ranks change, so that each cell belongs to
one part and every shard is visible; remaining cells divide the widest ones. So pictures are not to
scale, and their headings are indices. If these are too many cells, as with hundreds of interleaved
chunks, the grid has only the first of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.parts import TensorParts

_Edges = tuple[int, ...]  # of one dim: the first index of each cell, and the end


@dataclass(frozen=True)
class CellGrid:
    """A grid of cells, empty for a tensor without elements.

    Attributes:
        drawn: the part of the tensor that the cells cover, from its beginning.
        edges: of each dim, the first index of each cell, and the end; a scalar has a dim of size 1.
        cells: row by row, the index of the cell's part.
    """

    drawn: TensorBox
    edges: tuple[_Edges, ...]
    cells: tuple[tuple[int, ...], ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """The first index of each column."""
        return self.edges[-1][:-1]

    @property
    def headings(self) -> tuple[str, ...]:
        """The first indices of each row, one number per leading dim."""
        leading = (of_dim[:-1] for of_dim in self.edges[:-1])
        return tuple(",".join(map(str, index)) for index in itertools.product(*leading))

    @property
    def scaled(self) -> bool:
        """Whether a cell may be more than one element."""
        return any(b - a > 1 for of_dim in self.edges for a, b in itertools.pairwise(of_dim))


def grid(tensor: TensorParts, max_rows: int, max_columns: int) -> CellGrid:
    """Computes the grid of a tensor's parts.

    Args:
        tensor: the parts of a tensor of any number of dims.
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
    assert -1 not in cells, f"a cell of {tensor} belongs to no part"
    rows = (tuple(cells[n : n + columns]) for n in range(0, len(cells), columns))
    drawn = TensorBox(
        (0,) * len(tensor.shape), tuple(of_dim[-1] for of_dim in edges if tensor.shape)
    )
    return CellGrid(drawn, edges, tuple(rows))


def _cells(box: TensorBox, edges: Sequence[_Edges]) -> Sequence[int]:
    """Returns the numbers of the cells that a box covers."""
    if not box.sizes:  # of a scalar, whose grid has one dim
        box = TensorBox((0,), (1,))
    cells = [0]
    for of_dim, offset, size in zip(edges, box.offsets, box.sizes, strict=True):
        last = len(of_dim) - 1
        inside = range(
            min(bisect_left(of_dim, offset), last), min(bisect_left(of_dim, offset + size), last)
        )
        cells = [cell * last + n for cell in cells for n in inside]
    return cells


def _edges(changes: Sequence[set[int]], limit: int) -> tuple[_Edges, ...]:
    """Divides dims into cells, of which there are at most `limit` together.

    Args:
        changes: of each dim, the indices at which a box begins or ends, with 0 and the size.
        limit: number of cells, at least 1.
    """
    runs = [[range(a, b) for a, b in itertools.pairwise(sorted(of_dim))] for of_dim in changes]
    while (total := math.prod(map(len, runs))) > limit:
        longest = max(runs, key=len)
        available = limit * len(longest) // total  # given the cells of the other dims
        del longest[max(available, len(longest) // 2) :]
    cells = [[1] * len(of_dim) for of_dim in runs]
    # With several dims, runs are divided only if every element fits.
    if len(runs) > 1 and math.prod(max(of_dim) for of_dim in changes) > limit:
        return tuple(map(_divided, runs, cells))
    while (widest := _widest(runs, cells, limit)) is not None:
        cells[widest.dim][widest.run] += 1
    return tuple(map(_divided, runs, cells))


@dataclass(frozen=True)
class _RunIndex:
    """The indices of a dim and of one of its runs."""

    dim: int
    run: int


def _widest(
    runs: Sequence[Sequence[range]], cells: Sequence[Sequence[int]], limit: int
) -> _RunIndex | None:
    """Returns the run with the widest cells that may have one more; None if none may."""
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


def _divided(runs: Sequence[range], cells: Sequence[int]) -> _Edges:
    """Divides each run into its number of cells."""
    starts = (
        run.start + len(run) * n // count
        for run, count in zip(runs, cells, strict=True)
        for n in range(count)
    )
    return (*starts, runs[-1].stop)
