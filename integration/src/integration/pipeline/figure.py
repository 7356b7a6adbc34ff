"""Draws the timelines of several schedules."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from integration.pipeline.timeline import (
    BACKWARD,
    BACKWARD_OF_INPUTS,
    BACKWARD_OF_WEIGHTS,
    FORWARD,
    Timeline,
)
from integration.report.figures import new_figure, style_axes
from integration.report.palette import Theme

_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_OF_INPUTS: "backward of inputs",
    BACKWARD_OF_WEIGHTS: "backward of weights",
}


def draw_timelines(timelines: Mapping[str, Timeline], theme: Theme) -> Figure:
    """Returns the figure: a panel per schedule, with a line per rank.

    A rank's stages after its first are lighter; numbers are microbatches.
    """
    ranks = max(timeline.ranks for timeline in timelines.values())
    figure = new_figure(theme, len(timelines) * (0.62 + 0.27 * ranks) + 0.5)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    colours = dict(zip(_NAMES, theme.series, strict=False))
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        style_axes(axes, theme, f"{name}: {timeline.bubble:.1%} idle", grid_axis="x")
        for span in timeline.spans:
            action, width = span.action, span.action.seconds * 1e3
            axes.barh(
                span.rank, width, left=span.start * 1e3, height=0.86,
                color=colours[action.kind], alpha=1.0 if action.stage < timeline.ranks else 0.62,
                edgecolor=theme.background, linewidth=0.6,
            )  # fmt: skip
            if width > 0.01 * timeline.seconds * 1e3:  # the first stage has no inputs' gradients
                axes.text(
                    span.start * 1e3 + width / 2, span.rank, str(action.microbatch),
                    ha="center", va="center", fontsize=6, color=theme.background, clip_on=True,
                )  # fmt: skip
        axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
        axes.invert_yaxis()
    panels[-1].set_xlabel("ms, with one processor per rank")
    figure.legend(
        handles=[Patch(color=colours[kind], label=label) for kind, label in _NAMES.items()],
        loc="outside lower center", ncols=4, frameon=False, labelcolor=theme.ink, fontsize=9.5,
    )  # fmt: skip
    return figure
