"""The grid of an SVG picture: coloured cells with ranks in them, lines, and the indices around."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragged_shard.ownership import Ownership
from ragged_shard.picture.captions import DARK, colour, label, ranks_text
from ragged_shard.picture.grid import Grid
from ragged_shard.picture.svg_elements import CHARACTER, RIGHT, number, rectangle, swatch, text


@dataclass(frozen=True)
class Frame:
    """Where the grid is, in pixels: its corner, and the size of a cell."""

    left: float
    top: float
    cell_width: float
    cell_height: float

    def x(self, column: float) -> float:
        """The left edge of a column."""
        return self.left + column * self.cell_width

    def y(self, row: float) -> float:
        """The upper edge of a row."""
        return self.top + row * self.cell_height


@dataclass(frozen=True)
class _Block:
    """Equal neighbouring cells, drawn as one rectangle."""

    row: int
    column: int
    height: int
    width: int
    part: int


def drawn_headings(cells: Grid, frame: Frame) -> Iterator[str]:
    """The indices over the columns and before the rows, as far as they fit.

    In a scaled picture only where something changes, and there at the line, not within the cell.
    """
    within = 0.0 if cells.scaled else 0.5
    by_column = list(zip(*cells.cells, strict=True))
    free = 0.0
    for index, column in enumerate(cells.columns):
        half = len(str(column)) * CHARACTER / 2
        x = frame.x(index + within)
        if x - half >= free and not (cells.scaled and _same(by_column, index)):
            yield text(x, frame.top - 11, str(column), "index in")
            free = x + half + 6
    free = 0.0
    for index, heading in enumerate(cells.headings):
        y = frame.y(index + within)
        if heading and y >= free and not (cells.scaled and _same(cells.cells, index)):
            yield text(frame.left - 7, y + 4, heading, "index", RIGHT)
            free = y + 12


def _same(lines: Sequence[tuple[int, ...]], index: int) -> bool:
    """Whether a row or column is held as the one before it."""
    return index > 0 and lines[index - 1] == lines[index]


def drawn_cells(cells: Grid, ownership: Ownership, frame: Frame) -> Iterator[str]:
    """The cells, each part in its colour, and the ranks in them.

    In a scaled picture ranks are written once for equal neighbours, otherwise in every element.
    """
    blocks = list(_blocks(cells))
    for block in blocks:
        yield from _filled(block, ownership, frame)
    yield _lines(cells, frame)
    for block in blocks:
        if cells.scaled:
            yield from _labelled(ownership, frame, block)
            continue
        for row in range(block.row, block.row + block.height):
            for column in range(block.column, block.column + block.width):
                yield from _labelled(ownership, frame, _Block(row, column, 1, 1, block.part))


def _filled(block: _Block, ownership: Ownership, frame: Frame) -> Iterator[str]:
    x, y = frame.x(block.column), frame.y(block.row)
    width, height = block.width * frame.cell_width, block.height * frame.cell_height
    yield from swatch(block.part, ownership, rectangle(x, y, width, height))


def _lines(cells: Grid, frame: Frame) -> str:
    """Between elements thin, between parts and around them thick."""
    thin: list[str] = []
    thick: list[str] = []
    rows, columns = len(cells.cells), len(cells.columns)
    for n, m in itertools.product(range(rows + 1), range(columns)):
        line = f"M{number(frame.x(m))} {number(frame.y(n))}h{number(frame.cell_width)}"
        inside = 0 < n < rows and cells.cells[n - 1][m] == cells.cells[n][m]
        (thin if inside else thick).append(line)
    for n, m in itertools.product(range(rows), range(columns + 1)):
        line = f"M{number(frame.x(m))} {number(frame.y(n))}v{number(frame.cell_height)}"
        inside = 0 < m < columns and cells.cells[n][m - 1] == cells.cells[n][m]
        (thin if inside else thick).append(line)
    between = (
        "" if cells.scaled else f'<path d="{"".join(thin)}" stroke="#fff" stroke-opacity=".6"/>'
    )
    return f'{between}<path d="{"".join(thick)}" stroke="#222" shape-rendering="crispEdges"/>'


def _labelled(ownership: Ownership, frame: Frame, block: _Block) -> Iterator[str]:
    part = block.part
    full, short = ranks_text(ownership.parts[part].ranks), label(ownership.parts[part].ranks)
    space = block.width * frame.cell_width
    words = full if len(full) * CHARACTER + 6 <= space else short
    if len(words) * CHARACTER > space or block.height * frame.cell_height < 11:
        return
    x, y = frame.x(block.column + block.width / 2), frame.y(block.row + block.height / 2)
    behind = f'stroke="{colour(part)}" stroke-width="4" paint-order="stroke"'  # clear of patterns
    yield text(x, y, words, "in light" if colour(part) in DARK else "in", behind)


def _blocks(cells: Grid) -> Iterator[_Block]:
    """Rectangles of equal cells that cover the grid: each as wide, then as high, as can be."""
    left: list[list[int | None]] = [list(row) for row in cells.cells]
    for row, of_row in enumerate(left):
        for column, part in enumerate(of_row):
            if part is None:
                continue
            width = height = 1
            while of_row[column : column + width + 1] == [part] * (width + 1):
                width += 1
            same, right = [part] * width, column + width
            while row + height < len(left) and left[row + height][column:right] == same:
                height += 1
            for taken in left[row : row + height]:
                taken[column:right] = [None] * width
            yield _Block(row, column, height, width, part)
