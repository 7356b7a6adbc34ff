"""Renders the parts of a tensor as an SVG document."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ragged_shard.visualization.captions import (
    DARK,
    boxes_text,
    colour,
    headings,
    label,
    ranks_text,
    remarks,
    share_text,
)
from ragged_shard.visualization.grid import CellGrid, grid
from ragged_shard.visualization.parts import TensorParts

CHARACTER = 6.7  # pixels: about the width of a character at a font size of 12
RIGHT = 'text-anchor="end"'
STYLE = (
    "<style>text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#222}"
    ".title{font-size:15px;font-weight:bold}.note{fill:#555}.index{fill:#666;font-size:11px}"
    ".column{font-weight:bold}.in{text-anchor:middle;dominant-baseline:central}"
    ".light{fill:#fff}</style>"
)
PATTERNS = (
    '<defs><pattern id="copies" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V7" stroke="#000" stroke-opacity=".3" '
    'stroke-width="2.4"/></pattern>'
    '<pattern id="terms" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<circle cx="2" cy="2" r="1.3" fill-opacity=".45"/></pattern></defs>'
)


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Returns the attributes of a rectangle."""
    return f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'


def text(x: float, y: float, words: str, kind: str = "", attributes: str = "") -> str:
    """Returns a text element of one of the classes in `STYLE`."""
    kind = f' class="{kind}"' if kind else ""
    attributes = f" {attributes}" if attributes else ""
    return f'<text x="{number(x)}" y="{number(y)}"{kind}{attributes}>{escape(words)}</text>'


def number(value: float) -> str:
    """Formats pixels to a hundredth."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def swatch(part: int, tensor: TensorParts, where: str) -> Iterator[str]:
    """Yields a rectangle in a part's colour, and the pattern over it."""
    yield f'<rect {where} fill="{colour(part)}"/>'
    if len(tensor.parts[part].ranks) > 1:
        yield f'<rect {where} fill="url(#{_pattern(tensor)})"/>'


def _pattern(tensor: TensorParts) -> str:
    partial = any(placement.is_partial() for placement in tensor.placements)
    return "terms" if partial else "copies"


@dataclass(frozen=True)
class Frame:
    """The position of the grid in pixels: its corner, and the size of a cell."""

    left: float
    top: float
    cell_width: float
    cell_height: float

    def x(self, column: float) -> float:
        """Returns the left edge of a column."""
        return self.left + column * self.cell_width

    def y(self, row: float) -> float:
        """Returns the upper edge of a row."""
        return self.top + row * self.cell_height


@dataclass(frozen=True)
class _CellRectangle:
    """Neighbouring cells of one part, drawn as one rectangle."""

    row: int
    column: int
    height: int
    width: int
    part: int


def drawn_headings(cells: CellGrid, frame: Frame) -> Iterator[str]:
    """Yields the indices above the columns and left of the rows, as far as they fit.

    A scaled picture has them only where parts change, at the line instead of the cell's middle.
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
    """Whether a row or column has the same parts as the one before it."""
    return index > 0 and lines[index - 1] == lines[index]


def drawn_cells(cells: CellGrid, tensor: TensorParts, frame: Frame) -> Iterator[str]:
    """Yields the cells, each in its part's colour, and the ranks in them.

    A scaled picture has the ranks once for neighbouring cells of one part, others in every cell.
    """
    blocks = list(_rectangles(cells))
    for block in blocks:
        yield from _filled(block, tensor, frame)
    yield _lines(cells, frame)
    for block in blocks:
        if cells.scaled:
            yield from _labelled(tensor, frame, block)
            continue
        for row in range(block.row, block.row + block.height):
            for column in range(block.column, block.column + block.width):
                yield from _labelled(tensor, frame, _CellRectangle(row, column, 1, 1, block.part))


def _filled(block: _CellRectangle, tensor: TensorParts, frame: Frame) -> Iterator[str]:
    x, y = frame.x(block.column), frame.y(block.row)
    width, height = block.width * frame.cell_width, block.height * frame.cell_height
    yield from swatch(block.part, tensor, rectangle(x, y, width, height))


def _lines(cells: CellGrid, frame: Frame) -> str:
    """Returns the lines: thin between elements, thick between parts and around them."""
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


def _labelled(tensor: TensorParts, frame: Frame, block: _CellRectangle) -> Iterator[str]:
    part = block.part
    full, short = ranks_text(tensor.parts[part].ranks), label(tensor.parts[part].ranks)
    space = block.width * frame.cell_width
    words = full if len(full) * CHARACTER + 6 <= space else short
    if len(words) * CHARACTER > space or block.height * frame.cell_height < 11:
        return
    x, y = frame.x(block.column + block.width / 2), frame.y(block.row + block.height / 2)
    behind = f'stroke="{colour(part)}" stroke-width="4" paint-order="stroke"'  # above the pattern
    yield text(x, y, words, "in light" if colour(part) in DARK else "in", behind)


def _rectangles(cells: CellGrid) -> Iterator[_CellRectangle]:
    """Yields rectangles of one part that cover the grid, each as wide and then high as possible."""
    remaining: list[list[int | None]] = [list(row) for row in cells.cells]
    for row, of_row in enumerate(remaining):
        for column, part in enumerate(of_row):
            if part is None:
                continue
            width = height = 1
            while of_row[column : column + width + 1] == [part] * (width + 1):
                width += 1
            same, right = [part] * width, column + width
            while row + height < len(remaining) and remaining[row + height][column:right] == same:
                height += 1
            for covered in remaining[row : row + height]:
                covered[column:right] = [None] * width
            yield _CellRectangle(row, column, height, width, part)


_WIDTH = 860  # of the document, in pixels, as all that follows
_MARGIN = 24
_LINE = 20
_MAX_CELL = 40
_MIN_CELL = 14
_MAX_HEIGHT = 520  # of the grid
_MAX_ROWS = 40
_MAX_PARTS = 48


def svg(tensor: TensorParts) -> str:
    """Returns the picture of a tensor.

    Each part has a colour; it is hatched if several ranks have copies, dotted if they have terms of
    a sum. Colours repeat after eight parts, which the rank numbers distinguish.

    Returns:
        a complete SVG document.
    """
    titles = headings(tensor)
    widest = max(len(label(part.ranks)) for part in tensor.parts)
    cell_width = max(_MIN_CELL, widest * CHARACTER + 6)
    last = ",".join(str(max(size - 1, 0)) for size in tensor.shape[:-1])
    left = _MARGIN + len(last) * CHARACTER + 8
    columns = max(int((_WIDTH - _MARGIN - left) // cell_width), 1)
    cells = grid(tensor, _MAX_ROWS, columns)
    rows, columns = len(cells.cells), len(cells.columns)
    top = _MARGIN + _LINE * len(titles) + 34
    frame = Frame(
        left,
        top,
        min((_WIDTH - _MARGIN - left) / max(columns, 1), max(_MAX_CELL, cell_width)),
        min(_MAX_HEIGHT / max(rows, 1), 28),
    )
    body = [*_titles(titles)]
    if cells.cells:
        body += [*drawn_headings(cells, frame), *drawn_cells(cells, tensor, frame)]
    bottom = frame.y(rows) + (16 if rows else -24)
    for note in remarks(tensor, cells):
        bottom += 18
        body.append(text(_MARGIN, bottom - 4, note, "note"))
    bottom += 30
    body += _legend(tensor, bottom)
    height = bottom + _LINE * (min(len(tensor.parts), _MAX_PARTS + 1) + 1)
    return "\n".join([*_head(math.ceil(height), tensor), *body, "</svg>", ""])


def _head(height: int, tensor: TensorParts) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">'
    )
    yield f"<title>{escape(', '.join(line.strip() for line in headings(tensor)))}</title>"
    yield STYLE
    yield PATTERNS
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'


def _titles(lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        indent = 14 if line.startswith(" ") else 0
        y = _MARGIN + 6 + _LINE * index
        yield text(_MARGIN + indent, y, line.strip(), "title" if index == 0 else "")


def _legend(tensor: TensorParts, top: float) -> Iterator[str]:
    parts = tensor.parts[:_MAX_PARTS]
    longest = max(len("ranks"), *(len(ranks_text(part.ranks)) for part in parts))
    ranks = min(longest, 24)
    numbers = max(len("elements"), *(len(f"{part.numel:,}") for part in parts))
    step = CHARACTER + 0.6
    at_ranks = _MARGIN + 34
    at_elements = at_ranks + (ranks + numbers + 2) * step
    at_share = at_elements + 8 * step
    at_holds = at_share + 2 * step
    room = int((_WIDTH - _MARGIN - at_holds) / step)
    yield text(at_ranks, top, "ranks", "column")
    yield text(at_elements, top, "elements", "column", RIGHT)
    yield text(at_share, top, "share", "column", RIGHT)
    yield text(at_holds, top, "holds", "column")
    for index, part in enumerate(parts):
        y = top + _LINE * (index + 1)
        yield from swatch(index, tensor, rectangle(_MARGIN, y - 11, 24, 14))
        yield text(at_ranks, y, _shortened(ranks_text(part.ranks), ranks))
        yield text(at_elements, y, f"{part.numel:,}", "", RIGHT)
        yield text(at_share, y, share_text(part, tensor), "", RIGHT)
        yield text(at_holds, y, boxes_text(part, tensor.shape, room))
    if len(tensor.parts) > _MAX_PARTS:
        left = len(tensor.parts) - _MAX_PARTS
        yield text(at_ranks, top + _LINE * (_MAX_PARTS + 1), f"and {left} more", "note")


def _shortened(words: str, length: int) -> str:
    return words if len(words) <= length else f"{words[: length - 1]}…"
