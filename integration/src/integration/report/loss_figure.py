"""Draws loss curves and their differences from the single device."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from integration.compare.results import SystemResult
from integration.report.difference_axes import DifferenceLine, DifferencePanel, draw_differences
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import loss_unit
from integration.report.palette import Style, Theme
from integration.report.system_rows import label, styles


def draw_losses(
    results: Sequence[SystemResult], theme: Theme, drawn: Mapping[str, Style] | None = None
) -> Figure:
    """Returns the figure of one model's curves; the first result is the reference.

    Args:
        results: results of the model.
        theme: colours of the figure.
        drawn: styles by system; by default those of ``results``.
    """
    unit = loss_unit(results[0].model)
    drawn = drawn or styles(results, theme)
    figure = new_figure(theme, 8.0)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[5, 4])
    style_axes(losses, theme, f"Loss, {unit}", grid_axis="y")
    style_axes(differences, theme, f"|loss - loss of the single device|, {unit}", grid_axis="y")
    draw_curves(losses, results, drawn, theme)
    compared = [result for result in results if result.deviation is not None]
    tolerances = {result.tolerance for result in compared if result.tolerance > 0}
    panel = DifferencePanel(differences, difference_lines(results, drawn))
    draw_differences([panel], tolerances, theme)
    differences.set_xlabel("optimizer step")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def draw_curves(
    axes: Axes, results: Sequence[SystemResult], drawn: Mapping[str, Style], theme: Theme
) -> None:
    """Draws the loss of every step of every run, the reference behind the others."""
    count = max(len(results) - 1, 1)
    for index, result in enumerate(results):
        style = drawn[result.system]
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


def difference_lines(
    results: Sequence[SystemResult], drawn: Mapping[str, Style]
) -> list[DifferenceLine]:
    """Returns the lines of the runs that have a deviation from the reference."""
    return [
        DifferenceLine(result.deviation.differences, drawn[result.system], label(result))
        for result in results
        if result.deviation is not None
    ]
