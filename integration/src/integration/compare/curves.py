"""Draws loss curves and their differences from the reference."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from integration.compare.result import Result, Verdict
from integration.report.difference_axes import DifferenceLine, DifferencePanel, draw_differences
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import loss_unit
from integration.report.palette import Theme, style_of


def draw_losses(columns: Sequence[Sequence[Result]], titles: Sequence[str], theme: Theme) -> Figure:
    """Returns a figure with a column for each group of results: curves above differences.

    Args:
        columns: groups of results, the reference of each first.
        titles: the start of each column's title; empty for a single column.
        theme: colours of the figure.
    """
    figure = new_figure(theme, 8.0 if len(columns) == 1 else 7.0)
    cells = figure.subplots(2, len(columns), sharex="col", squeeze=False, height_ratios=[5, 4])
    panels = []
    for losses, differences, results, title in zip(*cells, columns, titles, strict=True):
        unit, reference = loss_unit(results[0].model), results[0].system
        start = f"{title}: loss" if title else "Loss"
        style_axes(losses, theme, f"{start}, {unit}", grid_axis="y")
        style_axes(differences, theme, f"|loss - loss under {reference}|, {unit}", grid_axis="y")
        draw_curves(losses, results, theme)
        panels.append(DifferencePanel(differences, difference_lines(results, theme)))
        name_steps(differences)
    compared = [each for results in columns for each in results if each.run.reference is not None]
    draw_differences(panels, {each.run.tolerance for each in compared}, theme)
    return figure


def draw_curves(axes: Axes, results: Sequence[Result], theme: Theme) -> None:
    """Draws the loss of every step of every run, the reference behind the others."""
    count = max(len(results) - 1, 1)
    for index, result in enumerate(results):
        style = style_of(result.system, theme)
        steps = [record.step for record in result.records]
        if index == 0:
            # A broad line behind the others, so that it stays visible below equal curves.
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
            # Markers at different steps for each system, so that equal curves do not hide them.
            markevery=slice((index - 1) * every // count, None, every),
            label=label(result),
        )
    axes.legend(frameon=False, labelcolor=theme.ink, fontsize=10, loc="upper right")


def difference_lines(results: Sequence[Result], theme: Theme) -> list[DifferenceLine]:
    """Returns the lines of the runs that have a deviation, over all of their steps."""
    return [
        DifferenceLine(result.whole.differences, style_of(result.system, theme), label(result))
        for result in results
        if result.whole is not None
    ]


def name_steps(axes: Axes) -> None:
    """Labels the axis of the optimizer steps, with whole numbers."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def label(result: Result) -> str:
    """Returns a system's label in a figure."""
    return f"{result.system} (failed)" if result.verdict is Verdict.FAILED else result.system
