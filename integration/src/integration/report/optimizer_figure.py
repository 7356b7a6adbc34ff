"""Draws the loss curves of each optimizer, unsharded and sharded, and their differences."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from integration.compare.results import OptimizerResult
from integration.report.difference_axes import DifferencePanel, draw_differences
from integration.report.figures import new_figure, style_axes
from integration.report.loss_figure import difference_lines, draw_curves
from integration.report.optimizer_text import TITLES
from integration.report.palette import Theme
from integration.report.system_rows import styles


def draw_optimizers(results: Sequence[OptimizerResult], theme: Theme) -> Figure:
    """Returns the figure: a column per optimizer, curves above differences."""
    figure = new_figure(theme, 7.0)
    cells = figure.subplots(2, len(results), sharex="col", squeeze=False, height_ratios=[5, 4])
    panels = []
    for losses, differences, result in zip(*cells, results, strict=True):
        style_axes(
            losses, theme, f"{TITLES[result.optimizer]}: loss, nats per token", grid_axis="y"
        )
        title = f"|loss - loss under {result.reference.system}|, nats per token"
        style_axes(differences, theme, title, grid_axis="y")
        drawn = styles(result.runs, theme)
        draw_curves(losses, result.runs, drawn, theme)
        panels.append(DifferencePanel(differences, difference_lines(result.runs, drawn)))
        differences.set_xlabel("optimizer step")
        differences.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    tolerances = {run.tolerance for result in results for run in result.runs[1:]}
    draw_differences(panels, tolerances, theme)
    return figure
