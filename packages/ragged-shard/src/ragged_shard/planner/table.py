"""A sweep as a table on the terminal: drawn by rich where it is installed, else plain."""

from collections.abc import Sequence
from typing import Literal, TextIO

from ragged_shard.planner.sweep import Point
from ragged_shard.planner.wording import percent

#: Sizes are in elements; "(x58)" says that 58 groups of the model are planned alike.
HEADINGS = (
    "rows",
    "ranks",
    "per rank",
    "padding",
    "worst group",
    "its padding",
    "proved",
)
#: Columns of words; the others are numbers.
LEFT = ("worst group", "proved")


def cells(point: Point) -> tuple[str, ...]:
    """One line of the table, a text for each of ``HEADINGS``."""
    worst = point.worst
    alike = f" (x{worst.alike})" if worst.alike > 1 else ""
    return (
        f"{point.rows:,}",
        f"{point.world_size:,}",
        f"{point.shard_size:,}",
        percent(point.padding_ratio),
        f"{worst.name}{alike}" if worst.padding else "-",
        percent(worst.padding_ratio) if worst.padding else "-",
        "smallest" if point.exact else f"within {percent(point.gap)}",
    )


def plain_table(points: Sequence[Point]) -> str:
    """The sweep in aligned columns, a blank line between granularities."""
    lines = [cells(point) for point in points]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *lines, strict=True)]
    texts = [_aligned(HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for index, (point, line) in enumerate(zip(points, lines, strict=True)):
        if index and points[index - 1].rows != point.rows:
            texts.append("")
        texts.append(_aligned(line, widths))
    return "\n".join(texts)


def print_table(points: Sequence[Point], file: TextIO) -> None:
    """Prints the sweep; with rich where it is installed, coloured where ``file`` is a terminal.

    Raises:
        ImportError: rich is missing; ``plain_table`` needs nothing.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        side: Literal["left", "right"] = "left" if heading in LEFT else "right"
        table.add_column(heading, justify=side, no_wrap=True)
    for index, point in enumerate(points):
        last = index + 1 == len(points) or points[index + 1].rows != point.rows
        table.add_row(*cells(point), end_section=last, style=_style(point))
    # Wide, whatever the terminal: the table usually takes 80 columns, and where it takes more a
    # line that wraps can be read, a number that is cut cannot.
    console = Console(file=file, width=160, highlight=False)
    # Written here, as rich would end the process by itself where the reader has gone.
    with console.capture() as captured:
        console.print(table)
    file.write(captured.get())


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    texts = [
        text.ljust(width) if heading in LEFT else text.rjust(width)
        for text, width, heading in zip(line, widths, HEADINGS, strict=True)
    ]
    return "  ".join(texts).rstrip()


def _style(point: Point) -> str:
    if point.padding_ratio < 0.03:
        return ""
    return "yellow" if point.padding_ratio < 0.1 else "red"
