"""Draws differences from the single device on a logarithmic axis that also shows zeros."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from integration.report.formatting import scientific
from integration.report.palette import Style, Theme

# Height in decades of the row in which a line's zeros are drawn, below the smallest difference.
_ROW = 0.4
# Space in decades above the largest value and its label.
_HEADROOM = 0.6


@dataclass(frozen=True)
class DifferenceLine:
    """The line of one run: |loss - reference| of every step, its style and its legend."""

    differences: tuple[float, ...]
    style: Style
    label: str


@dataclass(frozen=True)
class DifferencePanel:
    """Axes and their lines."""

    axes: Axes
    lines: Sequence[DifferenceLine]

    @property
    def with_zeros(self) -> list[DifferenceLine]:
        """The lines with a difference of zero at some step."""
        return [line for line in self.lines if 0.0 in line.differences]


def draw_differences(
    panels: Sequence[DifferencePanel], tolerances: Collection[float], theme: Theme
) -> None:
    """Draws every panel on one scale, with a dashed line at each tolerance."""
    every = [value for panel in panels for line in panel.lines for value in line.differences]
    shown = [*(value for value in every if 0 < value < math.inf), *tolerances] or [1e-6]
    bottom = math.floor(math.log10(min(shown)))
    top = math.log10(max(shown)) + _HEADROOM
    rows = max(len(panel.with_zeros) for panel in panels)
    band = _ROW * (rows + 1)
    for panel in panels:
        axes = panel.axes
        axes.set_yscale("log")
        axes.set_ylim(10 ** (bottom - band if rows else bottom - 0.1), 10**top)
        _draw_lines(panel, bottom, theme)
        for tolerance in tolerances:
            draw_tolerance(axes, tolerance, theme)
        if rows:
            axes.axhspan(
                10 ** (bottom - band), 10**bottom, color=theme.grid, alpha=0.5, linewidth=0
            )
        _name_decades(axes, bottom, top, zeros_at=10 ** (bottom - band / 2) if rows else None)


def _draw_lines(panel: DifferencePanel, bottom: int, theme: Theme) -> None:
    with_zeros = panel.with_zeros
    for line in panel.lines:
        row = bottom - _ROW * (with_zeros.index(line) + 1) if line in with_zeros else None
        _draw_one(panel.axes, line, row)
    if not panel.lines:
        panel.axes.text(
            *(0.5, 0.5, "nothing to compare"),
            transform=panel.axes.transAxes,
            ha="center",
            color=theme.muted,
        )


def _name_decades(axes: Axes, bottom: int, top: float, *, zeros_at: float | None) -> None:
    decades = range(bottom, math.floor(top) + 1)
    ticks = [10.0**decade for decade in decades]
    names = [f"$10^{{{decade}}}$" for decade in decades]
    if zeros_at is not None:
        ticks.insert(0, zeros_at)
        names.insert(0, "0 (bitwise\nequal)")
    axes.set_yticks(ticks, names)
    axes.minorticks_off()


def _draw_one(axes: Axes, line: DifferenceLine, row: float | None) -> None:
    """Draws one line: zeros in their ``row``, values that are not finite at the top."""
    found = dict(enumerate(line.differences, start=1))
    style = line.style
    axes.plot(
        list(found),
        [value if 0 < value < math.inf else math.nan for value in found.values()],
        color=style.colour,
        marker=style.marker,
        markersize=4,
        linewidth=0.9,
        alpha=0.9,
        label=line.label,
    )
    zeros = [step for step, value in found.items() if value == 0]
    if row is not None:
        axes.plot(zeros, [10**row] * len(zeros), style.marker, color=style.colour, markersize=4)
    infinite = [step for step, value in found.items() if not math.isfinite(value)]
    if infinite:
        across = axes.get_xaxis_transform()
        axes.plot(infinite, [0.95] * len(infinite), "x", color=style.colour, transform=across)
        axes.text(
            *(infinite[0], 0.9, "not finite"),
            color=style.colour,
            fontsize=9,
            va="top",
            transform=across,
        )


def draw_tolerance(axes: Axes, tolerance: float, theme: Theme, *, below: bool = False) -> None:
    """Draws a dashed line, labelled above its right end, or ``below`` its left end."""
    axes.axhline(tolerance, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"tolerance {scientific(tolerance)}",
        (0.01 if below else 1.0, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if below else 4),
        textcoords="offset points",
        ha="left" if below else "right",
        va="top" if below else "baseline",
        color=theme.ink,
        fontsize=9.5,
    )
