"""Ownership as an SVG document: the grid, each rank's share, and what each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ragged_shard.ownership import Ownership
from ragged_shard.picture.captions import (
    boxes_text,
    headings,
    label,
    ranks_text,
    remarks,
    share_text,
)
from ragged_shard.picture.grid import grid
from ragged_shard.picture.svg_elements import (
    CHARACTER,
    PATTERNS,
    RIGHT,
    STYLE,
    rectangle,
    swatch,
    text,
)
from ragged_shard.picture.svg_grid import Frame, drawn_cells, drawn_headings

_WIDTH = 860  # of the document, in pixels, as all that follows
_MARGIN = 24
_LINE = 20
_MAX_CELL = 40
_MIN_CELL = 14
_MAX_HEIGHT = 520  # of the grid
_MAX_ROWS = 40
_MAX_PARTS = 48


def svg(ownership: Ownership) -> str:
    """The picture of an ownership.

    A colour is a part's; hatched is what several ranks hold copies of, dotted what they hold terms
    of. Colours repeat after eight parts, and rank numbers say which is meant.

    Returns:
        A whole SVG document, which needs nothing else.
    """
    titles = headings(ownership)
    widest = max(len(label(part.ranks)) for part in ownership.parts)
    cell_width = max(_MIN_CELL, widest * CHARACTER + 6)
    last = ",".join(str(max(size - 1, 0)) for size in ownership.shape[:-1])
    left = _MARGIN + len(last) * CHARACTER + 8
    columns = max(int((_WIDTH - _MARGIN - left) // cell_width), 1)
    cells = grid(ownership, _MAX_ROWS, columns)
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
        body += [*drawn_headings(cells, frame), *drawn_cells(cells, ownership, frame)]
    bottom = frame.y(rows) + (16 if rows else -24)
    for note in remarks(ownership, cells):
        bottom += 18
        body.append(text(_MARGIN, bottom - 4, note, "note"))
    bottom += 30
    body += _legend(ownership, bottom)
    height = bottom + _LINE * (min(len(ownership.parts), _MAX_PARTS + 1) + 1)
    return "\n".join([*_head(math.ceil(height), ownership), *body, "</svg>", ""])


def _head(height: int, ownership: Ownership) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">'
    )
    yield f"<title>{escape(', '.join(line.strip() for line in headings(ownership)))}</title>"
    yield STYLE
    yield PATTERNS
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'


def _titles(lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        indent = 14 if line.startswith(" ") else 0
        y = _MARGIN + 6 + _LINE * index
        yield text(_MARGIN + indent, y, line.strip(), "title" if index == 0 else "")


def _legend(ownership: Ownership, top: float) -> Iterator[str]:
    parts = ownership.parts[:_MAX_PARTS]
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
        yield from swatch(index, ownership, rectangle(_MARGIN, y - 11, 24, 14))
        yield text(at_ranks, y, _shortened(ranks_text(part.ranks), ranks))
        yield text(at_elements, y, f"{part.numel:,}", "", RIGHT)
        yield text(at_share, y, share_text(part, ownership), "", RIGHT)
        yield text(at_holds, y, boxes_text(part, ownership.shape, room))
    if len(ownership.parts) > _MAX_PARTS:
        left = len(ownership.parts) - _MAX_PARTS
        yield text(at_ranks, top + _LINE * (_MAX_PARTS + 1), f"and {left} more", "note")


def _shortened(words: str, length: int) -> str:
    return words if len(words) <= length else f"{words[: length - 1]}…"
