"""Draws grids of generated digits, a column per digit."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import pad

from integration.data.digits import CLASSES, SIDE
from integration.report.figures import save_png
from integration.report.palette import LIGHT, Theme

# An image and its frame, in pixels.
_CELL = SIDE + 2
_COMMAND_CELL_INCHES = 0.5


def draw_grid(axes: Axes, images: Tensor, theme: Theme) -> None:
    """Draws images (rows * 10, 1, 8, 8) in [-1, 1], classes 0 to 9 in turn: a column per class."""
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
    """Writes a grid of images (rows * 10, 1, 8, 8), as in ``draw_grid``, as PNG."""
    size = _COMMAND_CELL_INCHES * CLASSES, _COMMAND_CELL_INCHES * (len(images) // CLASSES + 0.6)
    figure = Figure(figsize=size, layout="constrained", facecolor=LIGHT.background)
    draw_grid(figure.subplots(), images, LIGHT)
    save_png(figure, path)
