"""The timelines of torch's pipeline schedules, for stages of equal duration."""

from collections.abc import Mapping

from matplotlib.axes import Axes

from integration.gallery.picture import Picture, add_legend, as_png, gallery_figure
from integration.pipeline.schedules import SCHEDULES
from integration.pipeline.timeline import (
    BACKWARD,
    BACKWARD_OF_INPUTS,
    BACKWARD_OF_WEIGHTS,
    FORWARD,
    Timeline,
    replay,
    schedule_orders,
)
from integration.report.figures import style_axes
from integration.report.palette import LIGHT

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
RANKS = 4
MICROBATCHES = 8
_COLOURS = {
    FORWARD: ("forward", LIGHT.series[0]),
    BACKWARD: ("backward", LIGHT.series[2]),
    BACKWARD_OF_INPUTS: ("backward of inputs", LIGHT.series[1]),
    BACKWARD_OF_WEIGHTS: ("backward of weights", LIGHT.series[3]),
}


def timelines() -> dict[str, Timeline]:
    """Returns the timeline of each schedule.

    A forward of a rank's whole part of the model takes 1, a backward 2, and half of a backward 1. A
    rank with two stages takes half as long for each.
    """
    found: dict[str, Timeline] = {}
    for name in NAMES:
        schedule = SCHEDULES[name]
        part = 1 / (schedule.stages_per_rank or 2)
        seconds: Mapping[str, float] = {
            FORWARD: part, BACKWARD: 2 * part, BACKWARD_OF_INPUTS: part, BACKWARD_OF_WEIGHTS: part,
        }  # fmt: skip
        found[name] = replay(schedule_orders(schedule, RANKS, MICROBATCHES, seconds))
    return found


def _draw_panel(axes: Axes, name: str, timeline: Timeline) -> None:
    style_axes(axes, LIGHT, f"{name}: {timeline.bubble:.1%} idle", grid_axis="x")
    for span in timeline.spans:
        action, width = span.action, span.action.seconds
        axes.barh(
            span.rank, width, left=span.start, height=0.9, color=_COLOURS[action.kind][1],
            alpha=1.0 if action.stage < timeline.ranks else 0.6,
            edgecolor=LIGHT.background, linewidth=0.6,
        )  # fmt: skip
        axes.text(
            span.start + width / 2, span.rank, str(action.microbatch),
            ha="center", va="center", fontsize=6.5, color=LIGHT.background,
        )  # fmt: skip
    axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
    axes.invert_yaxis()


def draw() -> bytes:
    """Draws a panel per schedule; a rank's second stage is lighter, numbers are microbatches."""
    shown = timelines()
    figure = gallery_figure(1.45 * len(shown) + 0.6)
    panels = figure.subplots(len(shown), 1, sharex=True)
    for axes, (name, timeline) in zip(panels, shown.items(), strict=True):
        _draw_panel(axes, name, timeline)
    panels[-1].set_xlabel("time, in forwards of a rank's part of the model")
    add_legend(figure, dict(_COLOURS.values()), columns=4)
    return as_png(figure)


PICTURE = Picture("pipelines.png", draw)
