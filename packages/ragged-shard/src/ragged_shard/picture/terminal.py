"""Ownership as lines of characters, whose colours a terminal may show or leave out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragged_shard.ownership import Ownership
from ragged_shard.picture.captions import (
    boxes_text,
    colour,
    headings,
    label,
    ranks_text,
    remarks,
    share_text,
)
from ragged_shard.picture.grid import Grid, grid

_MAX_ROWS = 24
_MAX_COLUMNS = 64
_MAX_PARTS = 64


@dataclass(frozen=True)
class Span:
    """Characters, and their background: a colour, or None."""

    text: str
    colour: str | None = None


@dataclass(frozen=True)
class Line:
    """A line of the picture."""

    spans: tuple[Span, ...]

    @property
    def plain(self) -> str:
        """The line without colours."""
        return "".join(span.text for span in self.spans).rstrip()


def lines(ownership: Ownership, width: int) -> Iterator[Line]:
    """The picture of an ownership: what it is of, the grid, and what each rank holds.

    Args:
        ownership: of any tensor.
        width: in characters, which no line exceeds unless a placement does.
    """
    yield from map(_plain, headings(ownership))
    yield _plain("")
    labels = [label(part.ranks) for part in ownership.parts]
    cell = max(map(len, labels)) + 2
    last = (str(max(size - 1, 0)) for size in ownership.shape[:-1])
    margin = len(",".join(last)) + 1
    columns = min(max((width - margin) // cell, 1), _MAX_COLUMNS)
    cells = grid(ownership, _MAX_ROWS, columns)
    yield from _picture(cells, labels, margin, cell)
    notes = remarks(ownership, cells)
    if notes:
        yield _plain("")
        yield from map(_plain, notes)
    yield _plain("")
    yield from _table(ownership, width)


def _picture(cells: Grid, labels: Sequence[str], margin: int, width: int) -> Iterator[Line]:
    if not cells.cells:
        return
    heading, end = " " * margin, margin + len(cells.columns) * width
    for index, column in enumerate(cells.columns):
        longer = heading.ljust(margin + index * width) + f"{column:^{width}}".rstrip()
        if len(heading) <= margin + index * width and len(longer) <= end:
            heading = f"{longer} "
    yield _plain(heading.rstrip())
    for first, row in zip(cells.headings, cells.cells, strict=True):
        spans = [Span(first.rjust(margin - 1) + " ")]
        spans += [Span(f"{labels[part]:^{width}}", colour(part)) for part in row]
        yield Line(tuple(spans))


def _table(ownership: Ownership, width: int) -> Iterator[Line]:
    rows = [
        (ranks_text(part.ranks), f"{part.numel:,}", share_text(part, ownership))
        for part in ownership.parts[:_MAX_PARTS]
    ]
    titles = ("ranks", "elements", "share")
    widths = [max(len(row[n]) for row in (titles, *rows)) for n in range(3)]
    yield _plain("   " + _row(titles, widths) + "  holds")
    for index, row in enumerate(rows):
        text = _row(row, widths)
        part = ownership.parts[index]
        held = boxes_text(part, ownership.shape, width - len(text) - 5)
        yield Line((Span("  ", colour(index)), Span(f" {text}  {held}")))
    if len(ownership.parts) > _MAX_PARTS:
        yield _plain(f"   and {len(ownership.parts) - _MAX_PARTS} more")


def _row(values: Sequence[str], widths: Sequence[int]) -> str:
    ranks, elements, share = values
    return f"{ranks:<{widths[0]}}  {elements:>{widths[1]}}  {share:>{widths[2]}}"


def _plain(text: str) -> Line:
    return Line((Span(text),))
