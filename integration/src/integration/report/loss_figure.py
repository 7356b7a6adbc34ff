"""Loss curves over each other, and how far each lies from the single device's."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from integration.compare.results import SystemResult
from integration.report.figures import dress, new_figure
from integration.report.palette import Style, Theme, label, styles
from integration.report.wording import scientific

# Decades below the smallest difference in which each system with zeros gets a row.
_ROW = 0.4
# Decades above the largest number that keep it, and its label, off the title.
_HEADROOM = 0.6


def draw_losses(results: Sequence[SystemResult], theme: Theme) -> Figure:
    """Return the figure of the curves; the first result is the reference."""
    figure = new_figure(theme, 8.0)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[5, 4])
    dress(losses, theme, "Loss, nats per token", grid_axis="y")
    dress(differences, theme, "|loss - loss of the single device|, nats per token", grid_axis="y")
    drawn = styles(results, theme)
    _draw_curves(losses, results, drawn, theme)
    _draw_differences(differences, results, drawn, theme)
    differences.set_xlabel("optimizer step")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def _draw_curves(
    axes: Axes, results: Sequence[SystemResult], drawn: dict[str, Style], theme: Theme
) -> None:
    count = max(len(results) - 1, 1)
    for index, result in enumerate(results):
        style = drawn[result.system]
        steps = [record.step for record in result.records]
        if index == 0:
            # Broad and behind: curves on top of it stay visible, and so does that they are.
            axes.plot(steps, result.losses, color=style.colour, linewidth=7, label=label(result))
            continue
        every = max(len(steps) // 8, count)
        axes.plot(
            steps,
            result.losses,
            color=style.colour,
            linewidth=1.3,
            marker=style.marker,
            markersize=5.5,
            # Each system marks steps of its own, or equal curves would hide each other's marks.
            markevery=slice((index - 1) * every // count, None, every),
            label=label(result),
        )
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=10, loc="upper right")


def _draw_differences(
    axes: Axes, results: Sequence[SystemResult], drawn: dict[str, Style], theme: Theme
) -> None:
    compared = [result for result in results if result.deviation is not None]
    tolerances = {result.tolerance for result in compared if result.tolerance > 0}
    positive = [value for each in compared for value in _differences(each) if 0 < value < math.inf]
    shown = [*positive, *tolerances] or [1e-6]
    bottom = math.floor(math.log10(min(shown)))
    top = math.log10(max(shown)) + _HEADROOM
    with_zeros = [result for result in compared if 0.0 in _differences(result)]
    band = _ROW * (len(with_zeros) + 1)
    axes.set_yscale("log")
    axes.set_ylim(10 ** (bottom - band if with_zeros else bottom - 0.1), 10**top)
    for result in compared:
        row = bottom - _ROW * (with_zeros.index(result) + 1) if result in with_zeros else None
        _draw_one(axes, result, drawn[result.system], row)
    for tolerance in tolerances:
        _draw_tolerance(axes, tolerance, theme)
    decades = range(bottom, math.floor(top) + 1)
    ticks = [10.0**decade for decade in decades]
    names = [f"$10^{{{decade}}}$" for decade in decades]
    if with_zeros:
        axes.axhspan(10 ** (bottom - band), 10**bottom, color=theme.grid, alpha=0.5, linewidth=0)
        ticks.insert(0, 10 ** (bottom - band / 2))
        names.insert(0, "0 (bitwise\nequal)")
    axes.set_yticks(ticks, names)
    axes.minorticks_off()
    if not compared:
        axes.text(
            0.5, 0.5, "nothing to compare", transform=axes.transAxes, ha="center", color=theme.muted
        )


def _draw_one(axes: Axes, result: SystemResult, style: Style, row: float | None) -> None:
    """Draw one system's differences: zeros in their ``row``, what is not finite at the top."""
    found = dict(enumerate(_differences(result), start=1))
    line = [value if 0 < value < math.inf else math.nan for value in found.values()]
    axes.plot(
        list(found),
        line,
        color=style.colour,
        marker=style.marker,
        markersize=4,
        linewidth=0.9,
        alpha=0.9,
    )
    zeros = [step for step, value in found.items() if value == 0]
    if row is not None:
        axes.plot(zeros, [10**row] * len(zeros), style.marker, color=style.colour, markersize=4)
    lost = [step for step, value in found.items() if not math.isfinite(value)]
    if lost:
        across = axes.get_xaxis_transform()
        axes.plot(lost, [0.95] * len(lost), "x", color=style.colour, transform=across)
        axes.text(
            lost[0], 0.9, "not finite", color=style.colour, fontsize=9, va="top", transform=across
        )


def _draw_tolerance(axes: Axes, tolerance: float, theme: Theme) -> None:
    axes.axhline(tolerance, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"tolerance {scientific(tolerance)}",
        (1.0, tolerance),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=theme.ink,
        fontsize=9.5,
    )


def _differences(result: SystemResult) -> tuple[float, ...]:
    return result.deviation.differences if result.deviation is not None else ()
