"""Sampled digits in grids, a column for each; and the loss curves of the runs that drew them."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn.functional import pad

from integration.compare.results import DiffusionResult
from integration.data.digits import CLASSES, SIDE
from integration.report.difference_axes import DifferenceLine, DifferencePanel, draw_differences
from integration.report.figures import WIDTH_INCHES, dress, new_figure, save_png
from integration.report.formatting import scientific
from integration.report.loss_figure import draw_curves
from integration.report.palette import LIGHT, Theme, styles

# An image and the line around it, in pixels.
_CELL = SIDE + 2
_COMMAND_CELL_INCHES = 0.5


def draw_diffusion(result: DiffusionResult, theme: Theme) -> Figure:
    """Return the figure: real images and each run's images above losses and their differences."""
    rows = result.samples
    grids = [("images of the data", result.real)]
    grids += [(f"drawn by {drawn.system}", drawn.images) for drawn in result.drawn]
    columns = 1 + len(result.runs)
    height = rows * WIDTH_INCHES / (CLASSES * columns)
    figure = new_figure(theme, height + 4.2)
    above, below = figure.subfigures(2, 1, height_ratios=[height + 0.6, 3.6], squeeze=False)[:, 0]
    for part in (above, below):
        part.set_facecolor(theme.background)
    cells = above.subplots(1, columns, squeeze=False)[0]
    for axes, (title, images) in zip(cells, grids, strict=False):
        draw_grid(axes, images, theme)
        axes.set_title(title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=8)
    for axes in cells[len(grids) :]:
        axes.set_axis_off()
    losses, differences = below.subplots(1, 2)
    _draw_losses(losses, differences, result, theme)
    return figure


def draw_grid(axes: Axes, images: Tensor, theme: Theme) -> None:
    """Draw images (rows * 10, 1, 8, 8) in [-1, 1], classes 0 to 9 in turn: a column for each."""
    rows = len(images) // CLASSES
    framed = pad(images.squeeze(1), (1, 1, 1, 1), value=torch.nan)
    grid = framed.unflatten(0, (rows, CLASSES)).transpose(1, 2).reshape(rows * _CELL, -1)
    colours = LinearSegmentedColormap.from_list(
        "pixels", [theme.background, theme.ink], bad=theme.grid
    )
    axes.imshow(np.ma.masked_invalid(grid.numpy()), cmap=colours, vmin=-1, vmax=1)
    axes.set_yticks([])
    middles = [_CELL * (digit + 0.5) - 0.5 for digit in range(CLASSES)]
    axes.set_xticks(middles, [str(digit) for digit in range(CLASSES)])
    axes.tick_params(colors=theme.muted, labelsize=9.5, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def save_grid(images: Tensor, path: Path) -> None:
    """Write images (rows * 10, 1, 8, 8), as ``draw_grid`` takes them, as a bitmap."""
    size = _COMMAND_CELL_INCHES * CLASSES, _COMMAND_CELL_INCHES * (len(images) // CLASSES + 0.6)
    figure = Figure(figsize=size, layout="constrained", facecolor=LIGHT.background)
    draw_grid(figure.subplots(), images, LIGHT)
    save_png(figure, path)


def _draw_losses(losses: Axes, differences: Axes, result: DiffusionResult, theme: Theme) -> None:
    dress(losses, theme, f"{result.model}: loss, squared error per pixel", grid_axis="y")
    dress(differences, theme, "|loss - loss of the single device|", grid_axis="y")
    drawn = styles(result.runs, theme)
    draw_curves(losses, result.runs, drawn, theme)
    run, lines = result.runs[1], []
    if result.whole is not None:
        lines = [DifferenceLine(result.whole.differences, drawn[run.system], run.system)]
    draw_differences([DifferencePanel(differences, lines)], (), theme)
    _draw_judged(differences, run.tolerance, result.judged, theme)
    for axes in (losses, differences):
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _draw_judged(axes: Axes, tolerance: float, steps: int, theme: Theme) -> None:
    """Draw the tolerance over the steps that it is for."""
    axes.plot([1, steps], [tolerance] * 2, color=theme.ink, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"tolerance {scientific(tolerance)}, to step {steps}",
        (1, tolerance),
        xytext=(0, 4),
        textcoords="offset points",
        color=theme.ink,
        fontsize=9.5,
    )
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, max(top, 10 * tolerance))
