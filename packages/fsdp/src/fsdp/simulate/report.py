"""Renders tables as text, and stacked bar charts as SVG.

Colours are those of Okabe and Ito, which most colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["CHART_WIDTH", "BarChart", "align_columns", "format_bytes", "format_seconds", "to_svg"]

CHART_WIDTH = 560  # pixels, of the longest bar
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#999999", "#56B4E9", "#D55E00", "#CC79A7")
_LEFT, _BAR_HEIGHT, _PITCH = 130, 16, 24  # pixels
_LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class BarChart:
    """A chart of stacked bars.

    Attributes:
        title: text above the chart.
        bars: for each bar, by name, the lengths of its parts by kind; all have the same kinds.
        format_total: formats the length of a bar.
    """

    title: str
    bars: Mapping[str, Mapping[str, float]]
    format_total: Callable[[float], str]


def align_columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Returns rows as lines of text, the first column left-aligned and the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def format_bytes(nbytes: float) -> str:
    """Formats bytes with three digits and a decimal unit."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Formats seconds with three digits, as ms below 1 s."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def to_svg(charts: Sequence[BarChart]) -> str:
    """Returns an SVG of charts, one below the other; the longest bar of each is `CHART_WIDTH`."""
    top, parts = 10.0, []
    for position, chart in enumerate(charts):
        text, top = _chart(chart, top + 14 if position else top)
        parts.append(text)
    width = _LEFT + CHART_WIDTH + 90
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _chart(chart: BarChart, top: float) -> tuple[str, float]:
    """Returns the elements of a chart, and the position of its end."""
    kinds = list(next(iter(chart.bars.values())))
    longest = max(sum(bar.values()) for bar in chart.bars.values()) or 1.0
    parts = [_text(10, top + 12, chart.title, weight="bold")]
    top += 24
    for position, kind in enumerate(kinds):
        left = 10 + 165 * (position % _LEGEND_COLUMNS)
        y = top + 18 * (position // _LEGEND_COLUMNS)
        parts += [_rect(left, y, 11, 11, _COLOURS[position]), _text(left + 16, y + 10, kind)]
    top += 18 * -(-len(kinds) // _LEGEND_COLUMNS) + 8
    for name, bar in chart.bars.items():
        x = float(_LEFT)
        parts.append(_text(_LEFT - 8, top + _BAR_HEIGHT - 4, name, "end"))
        for position, value in enumerate(bar.values()):
            width = CHART_WIDTH * value / longest
            parts.append(_rect(x, top, width, _BAR_HEIGHT, _COLOURS[position]))
            x += width
        parts.append(_text(x + 6, top + _BAR_HEIGHT - 4, chart.format_total(sum(bar.values()))))
        top += _PITCH
    return "".join(parts), top


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
