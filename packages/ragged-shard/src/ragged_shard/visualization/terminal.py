"""Renders the parts of a tensor as lines of text, in colour if the terminal supports it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

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

_MAX_ROWS = 24
_MAX_COLUMNS = 64
_MAX_PARTS = 64


@dataclass(frozen=True)
class StyledText:
    """Text with an optional background colour."""

    text: str
    colour: str | None = None


@dataclass(frozen=True)
class StyledLine:
    """One line of the picture."""

    spans: tuple[StyledText, ...]

    @property
    def plain(self) -> str:
        """The line without colours."""
        return "".join(span.text for span in self.spans).rstrip()


def print_lines(tensor: TensorParts, file: TextIO) -> None:
    """Prints the picture, in colour if rich is installed."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        for line in styled_lines(tensor, shutil.get_terminal_size().columns):
            print(line.plain, file=file)
        return

    def coloured(line: StyledLine) -> Text:
        text = Text()
        for span in line.spans:
            front = "white" if span.colour in DARK else "black"
            text.append(span.text, f"{front} on {span.colour}" if span.colour else "")
        return text

    console = Console(file=file, highlight=False)
    for line in styled_lines(tensor, console.width):
        console.print(coloured(line), soft_wrap=True)


def styled_lines(tensor: TensorParts, width: int) -> Iterator[StyledLine]:
    """Yields the lines of the picture: headings, the grid, notes, and each rank's elements.

    Args:
        tensor: the parts of a tensor of any number of dims.
        width: in characters, which no line exceeds unless a placement's description does.
    """
    yield from map(_plain, headings(tensor))
    yield _plain("")
    labels = [label(part.ranks) for part in tensor.parts]
    cell = max(map(len, labels)) + 2
    last = (str(max(size - 1, 0)) for size in tensor.shape[:-1])
    margin = len(",".join(last)) + 1
    columns = min(max((width - margin) // cell, 1), _MAX_COLUMNS)
    cells = grid(tensor, _MAX_ROWS, columns)
    yield from _cell_lines(cells, labels, margin, cell)
    notes = remarks(tensor, cells)
    if notes:
        yield _plain("")
        yield from map(_plain, notes)
    yield _plain("")
    yield from _table(tensor, width)


def _cell_lines(
    cells: CellGrid, labels: Sequence[str], margin: int, width: int
) -> Iterator[StyledLine]:
    if not cells.cells:
        return
    heading, end = " " * margin, margin + len(cells.columns) * width
    for index, column in enumerate(cells.columns):
        longer = heading.ljust(margin + index * width) + f"{column:^{width}}".rstrip()
        if len(heading) <= margin + index * width and len(longer) <= end:
            heading = f"{longer} "
    yield _plain(heading.rstrip())
    for first, row in zip(cells.headings, cells.cells, strict=True):
        spans = [StyledText(first.rjust(margin - 1) + " ")]
        spans += [StyledText(f"{labels[part]:^{width}}", colour(part)) for part in row]
        yield StyledLine(tuple(spans))


def _table(tensor: TensorParts, width: int) -> Iterator[StyledLine]:
    rows = [
        (ranks_text(part.ranks), f"{part.numel:,}", share_text(part, tensor))
        for part in tensor.parts[:_MAX_PARTS]
    ]
    titles = ("ranks", "elements", "share")
    widths = [max(len(row[n]) for row in (titles, *rows)) for n in range(3)]
    yield _plain("   " + _row(titles, widths) + "  holds")
    for index, row in enumerate(rows):
        text = _row(row, widths)
        boxes = boxes_text(tensor.parts[index], tensor.shape, width - len(text) - 5)
        yield StyledLine((StyledText("  ", colour(index)), StyledText(f" {text}  {boxes}")))
    if len(tensor.parts) > _MAX_PARTS:
        yield _plain(f"   and {len(tensor.parts) - _MAX_PARTS} more")


def _row(values: Sequence[str], widths: Sequence[int]) -> str:
    ranks, elements, share = values
    return f"{ranks:<{widths[0]}}  {elements:>{widths[1]}}  {share:>{widths[2]}}"


def _plain(text: str) -> StyledLine:
    return StyledLine((StyledText(text),))
