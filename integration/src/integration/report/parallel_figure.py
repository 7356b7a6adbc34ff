"""Draws the largest difference of every variant from one device: a dot per case."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from integration.compare.parallel_jobs import ParallelCase
from integration.compare.parallelism import ParallelResult
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import scientific
from integration.report.palette import MARKERS, Theme
from integration.report.parallel_text import TITLES

#: Where differences of zero are drawn.
FLOOR = 1e-9


def draw_parallelism(results: Sequence[ParallelResult], theme: Theme) -> Figure:
    """Returns the figure, a column per model; variants that do not support it have no dot."""
    models = list(dict.fromkeys(result.model for result in results))
    ways = list(dict.fromkeys((result.way, result.native) for result in results))
    figure = new_figure(theme, 1.6 + 0.24 * len(ways))
    cells = figure.subplots(1, len(models), sharey=True, sharex=True, squeeze=False)[0]
    for axes, model in zip(cells, models, strict=True):
        style_axes(axes, theme, f"{model}: largest |Δ|", grid_axis="x")
        of_model = [result for result in results if result.model == model]
        for case, marker in zip(ParallelCase, MARKERS, strict=False):
            _draw_case(axes, [each for each in of_model if each.case is case], ways, marker, theme)
        axes.set_xscale("log")
        for tolerance in {each.tolerance for each in of_model}:
            axes.axvline(tolerance, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
            axes.set_xlabel(f"dashed: tolerance {scientific(tolerance)}", color=theme.muted)
    names = [f"{way} (native)" if native else way for way, native in ways]
    cells[0].set_yticks(range(len(ways)), names)
    cells[0].tick_params(axis="y", labelcolor=theme.ink, labelsize=9)
    cells[0].invert_yaxis()
    cells[0].legend(loc="lower right", fontsize=8, labelcolor=theme.ink, frameon=False)
    return figure


def _draw_case(
    axes: Axes,
    results: Sequence[ParallelResult],
    ways: Sequence[tuple[str, bool]],
    marker: str,
    theme: Theme,
) -> None:
    places, values, colours = [], [], []
    for result in results:
        if result.deviation is None or not math.isfinite(result.deviation.maximum):
            continue
        places.append(ways.index((result.way, result.native)))
        values.append(max(result.deviation.maximum, FLOOR))
        colours.append(theme.series[1] if result.native else theme.series[0])
    title = TITLES[results[0].case] if results else ""
    axes.scatter(values, places, c=colours, marker=marker, s=22, label=title or "_")
