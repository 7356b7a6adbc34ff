"""Draws the differences from the single device of runs that draw random numbers on shards."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from integration.compare.random_jobs import RANKS, RandomCase, Source
from integration.compare.random_numbers import RandomResult
from integration.report.difference_axes import DifferenceLine, DifferencePanel, draw_differences
from integration.report.figures import new_figure, style_axes
from integration.report.palette import MARKERS, Style, Theme, style_of
from integration.report.random_text import CASES


def draw_random(results: Sequence[RandomResult], theme: Theme) -> Figure:
    """Returns the figure: a panel per case, a colour per source, a marker per number of ranks."""
    figure = new_figure(theme, 4.6)
    cells = figure.subplots(1, len(RandomCase), sharey=True)
    panels = []
    for axes, case in zip(cells, RandomCase, strict=True):
        style_axes(axes, theme, f"{CASES[case].capitalize()} only", grid_axis="y")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        lines = [_line(each, theme) for each in results if each.case is case and each.deviation]
        panels.append(DifferencePanel(axes, lines))
    judged = {each.tolerance for each in results if each.source is not Source.NATIVE}
    draw_differences(panels, judged, theme)
    cells[0].set_ylabel("|loss - loss of the single device|, nats per token")
    # Both panels show the same runs, unless one failed.
    fullest = max(panels, key=lambda panel: len(panel.lines))
    handles, labels = fullest.axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            *(handles, labels),
            loc="outside lower center",
            ncols=len(labels),
            frameon=False,
            labelcolor=theme.ink,
            fontsize=10,
        )
    return figure


def source_colour(source: Source, theme: Theme) -> str:
    """Returns the colour of a source of random numbers."""
    return style_of(source, theme).colour


def _line(result: RandomResult, theme: Theme) -> DifferenceLine:
    assert result.deviation is not None
    marker = MARKERS[RANKS.index(result.ranks) % len(MARKERS)]
    style = Style(source_colour(result.source, theme), marker)
    name = "native DTensor" if result.source is Source.NATIVE else str(result.source)
    return DifferenceLine(result.deviation.differences, style, f"{name}, {result.ranks} ranks")
