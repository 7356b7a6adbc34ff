"""The common layout and file formats of the figures."""

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from integration.report.palette import Theme

WIDTH_INCHES = 11.0
_PNG_DPI = 180


def new_figure(theme: Theme, height_inches: float) -> Figure:
    """Returns an empty figure with a constrained layout."""
    return Figure(
        figsize=(WIDTH_INCHES, height_inches),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.05, wspace=0.04),
        facecolor=theme.background,
    )


def style_axes(axes: Axes, theme: Theme, title: str, *, grid_axis: str) -> None:
    """Sets a left-aligned title and a grid along ``grid_axis``, and removes the box."""
    axes.set_facecolor(theme.background)
    axes.set_title(title, loc="left", color=theme.ink, fontsize=11, fontweight="bold", pad=10)
    axes.grid(visible=True, axis="y" if grid_axis == "y" else "x", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=theme.muted, labelsize=9.5, length=0, which="both")
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(theme.muted)
        axis.label.set_fontsize(9.5)


def save_png(figure: Figure, path: Path) -> None:
    """Writes a figure as PNG, with twice the resolution of the page."""
    figure.savefig(path, dpi=_PNG_DPI)


def svg_of(figure: Figure) -> bytes:
    """Returns a figure as SVG, with letters as paths, which need no fonts."""
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "integration"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()
