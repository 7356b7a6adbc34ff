"""Writes a sweep: as a table in the terminal, drawn by rich where it is installed, and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, TextIO

from ragged_shard.planner.command_line.sweep import (
    GroupPlan,
    Recommendation,
    SweepPoint,
    SweepSettings,
    percent,
)
from ragged_shard.planner.models.shapes import ModelShapes

#: Sizes are in elements; "(x58)" means that 58 groups of the model have the same plan.
HEADINGS = (
    "rows",
    "ranks",
    "per rank",
    "padding",
    "worst group",
    "its padding",
    "proved",
)
#: Columns of text; the others are numbers.
LEFT = ("worst group", "proved")
#: Of the JSON. Raised when a key changes its meaning or is removed; new keys do not raise it.
VERSION = 1


def cells(point: SweepPoint) -> tuple[str, ...]:
    """Returns one row of the table, a text for each of ``HEADINGS``."""
    worst = point.worst
    count = f" (x{worst.identical})" if worst.identical > 1 else ""
    return (
        f"{point.rows:,}",
        f"{point.world_size:,}",
        f"{point.shard_size:,}",
        percent(point.padding_ratio),
        f"{worst.name}{count}" if worst.padding else "-",
        percent(worst.padding_ratio) if worst.padding else "-",
        "smallest" if point.exact else f"within {percent(point.gap)}",
    )


def plain_table(points: Sequence[SweepPoint]) -> str:
    """Returns the sweep in aligned columns, with a blank line between block sizes."""
    table = [cells(point) for point in points]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *table, strict=True)]
    texts = [_aligned(HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for index, (point, row) in enumerate(zip(points, table, strict=True)):
        if index and points[index - 1].rows != point.rows:
            texts.append("")
        texts.append(_aligned(row, widths))
    return "\n".join(texts)


def print_table(points: Sequence[SweepPoint], file: TextIO) -> None:
    """Prints the sweep with rich, coloured where ``file`` is a terminal.

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
    # Wide, whatever the terminal: the table usually takes 80 columns, and where it takes more, a
    # line that wraps can be read but a number that is cropped cannot.
    console = Console(file=file, width=160, highlight=False)
    # Written here, because rich would end the process itself where the reader has closed the pipe.
    with console.capture() as captured:
        console.print(table)
    file.write(captured.get())


def to_json(
    model: ModelShapes,
    settings: SweepSettings,
    points: Sequence[SweepPoint],
    recommendations: Sequence[Recommendation] = (),
) -> str:
    """Returns all figures of a sweep as JSON; sizes in elements, ratios as shares of one.

    Args:
        model: The model that was swept.
        settings: The settings of the sweep.
        points: The sweep.
        recommendations: The recommendations, if they were asked for.
    """
    figures = {
        "version": VERSION,
        "model": model.name,
        "parameters": model.numel,
        "rows_apply_to": settings.target,
        "order": settings.order,
        "alignment": settings.alignment,
        "points": [_point(point) for point in points],
        "recommended": [
            {"rows": item.point.rows, "world_size": item.point.world_size}
            for item in recommendations
        ],
    }
    return json.dumps(figures, indent=2)


def _point(point: SweepPoint) -> dict[str, Any]:
    return {
        "rows": point.rows,
        "world_size": point.world_size,
        "shard_size": point.shard_size,
        "padding": point.padding,
        "padding_ratio": point.padding_ratio,
        "exact": point.exact,
        "worst_group": point.worst.name,
        "groups": [_group(group) for group in point.groups],
    }


def _group(group: GroupPlan) -> dict[str, Any]:
    figures = asdict(group)
    figures["alike"] = figures.pop("identical")  # the key of this version
    return figures | {"padding_ratio": group.padding_ratio}


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    texts = [
        text.ljust(width) if heading in LEFT else text.rjust(width)
        for text, width, heading in zip(row, widths, HEADINGS, strict=True)
    ]
    return "  ".join(texts).rstrip()


def _style(point: SweepPoint) -> str:
    if point.padding_ratio < 0.03:
        return ""
    return "yellow" if point.padding_ratio < 0.1 else "red"
