"""Draws the difference of every variant from one device: a row per model, a column per case."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from integration.compare.parallel_jobs import ParallelCase
from integration.compare.parallelism import ParallelResult
from integration.report.difference_axes import draw_tolerance
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import loss_unit
from integration.report.palette import Theme
from integration.report.parallel_figure import FLOOR
from integration.report.parallel_text import TITLES

_RANDOM_CASES = (ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH)


def draw_cases(results: Sequence[ParallelResult], theme: Theme) -> Figure:
    """Returns the figure: a thin line per variant, those of native DTensor in another colour."""
    models = list(dict.fromkeys(result.model for result in results))
    figure = new_figure(theme, 0.8 + 2.4 * len(models))
    grid = figure.subplots(len(models), len(_RANDOM_CASES), sharex=True, sharey=True, squeeze=False)
    for cells, model in zip(grid, models, strict=True):
        cells[0].set_ylabel(f"|Δ|, {loss_unit(model)}")
        for axes, case in zip(cells, _RANDOM_CASES, strict=True):
            style_axes(axes, theme, f"{model}: {TITLES[case]}", grid_axis="y")
            shown = [each for each in results if each.model == model and each.case is case]
            _draw_panel(axes, shown, theme)
    for axes in grid[-1]:
        axes.set_xlabel("optimizer step")
    colours = {"with all packages, a line per variant": 0, "native DTensor": 1}
    figure.legend(
        handles=[
            Line2D([], [], color=theme.series[at], label=name) for name, at in colours.items()
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        labelcolor=theme.ink,
        fontsize=10,
    )
    return figure


def _draw_panel(axes: Axes, results: Sequence[ParallelResult], theme: Theme) -> None:
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for result in results:
        if result.deviation is None:
            continue
        found = result.deviation.differences
        axes.plot(
            range(1, len(found) + 1),
            [max(value, FLOOR) if math.isfinite(value) else math.nan for value in found],
            color=theme.series[1 if result.native else 0],
            linewidth=0.8,
            marker="o",
            markersize=2.5,
            alpha=0.9 if result.native else 0.4,
        )
    for tolerance in {each.tolerance for each in results}:
        draw_tolerance(axes, tolerance, theme, below=True)
    if not results:
        axes.text(
            *(0.5, 0.5, "no runs"),
            transform=axes.transAxes,
            ha="center",
            color=theme.muted,
        )
    ticks = [FLOOR, *(10.0**decade for decade in range(-8, 0, 2))]
    axes.set_yticks(ticks, ["0", *(f"$10^{{{decade}}}$" for decade in range(-8, 0, 2))])
