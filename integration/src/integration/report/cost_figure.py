"""Draws step time, memory and collectives of every system as bars."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from integration.compare.cost import Cost
from integration.compare.results import SystemResult
from integration.report.figures import new_figure, style_axes
from integration.report.formatting import TIMES
from integration.report.palette import Style, Theme
from integration.report.system_rows import label, styles

_BAR = 0.62
_MIB = 2**20


def draw_cost(
    results: Sequence[SystemResult], theme: Theme, drawn: Mapping[str, Style] | None = None
) -> Figure:
    """Returns the figure of one model; systems that failed have a label instead of a bar.

    Args:
        results: results of the model.
        theme: colours of the figure.
        drawn: styles by system; by default those of ``results``.
    """
    figure = new_figure(theme, 1.2 + 0.5 * len(results))
    times, memory, collectives = figure.subplots(1, 3, sharey=True)
    style_axes(times, theme, "Median step time, ms", grid_axis="x")
    style_axes(memory, theme, "Peak memory per rank, MiB", grid_axis="x")
    style_axes(collectives, theme, "Collectives of a step, MiB", grid_axis="x")
    drawn = drawn or styles(results, theme)
    for place, result in enumerate(results):
        if result.cost is None:
            for axes in (times, memory, collectives):
                axes.text(0, place, " failed", va="center", color=theme.muted, fontsize=9.5)
            continue
        _draw_time(times, place, result, result.cost, drawn[result.system], theme)
        _draw_memory(memory, place, result.cost, drawn[result.system], theme)
        _draw_collectives(collectives, place, result, drawn[result.system], theme)
    times.set_yticks(range(len(results)), [label(result) for result in results])
    times.tick_params(axis="y", labelcolor=theme.ink, labelsize=10.5)
    times.invert_yaxis()
    for axes in (times, memory, collectives):
        # Space for the numbers to the right of the bars.
        axes.set_xlim(0, max(axes.dataLim.x1, 1e-9) * 1.5)
    return figure


def _draw_time(
    axes: Axes, place: int, result: SystemResult, cost: Cost, style: Style, theme: Theme
) -> None:
    median = cost.step_seconds * 1e3
    low, high = (seconds * 1e3 for seconds in cost.quartiles)
    axes.barh(place, median, height=_BAR, color=style.colour)
    axes.errorbar(
        median, place, xerr=[[median - low], [high - median]], color=theme.ink, capsize=3, lw=1.1
    )
    relative = result.relative_step_time
    ratio = "" if relative is None else f"   {relative:.2f}{TIMES}"
    _write(axes, max(median, high), place, f"{median:,.0f}{ratio}", theme)


def _draw_memory(axes: Axes, place: int, cost: Cost, style: Style, theme: Theme) -> None:
    mean, largest = cost.peak_rss_mean / _MIB, cost.peak_rss_max / _MIB
    axes.barh(place, mean, height=_BAR, color=style.colour)
    axes.plot([largest, largest], [place - 0.2, place + 0.2], color=theme.ink, linewidth=1.6)
    _write(axes, max(mean, largest), place, f"{mean:,.0f}", theme)


def _draw_collectives(
    axes: Axes, place: int, result: SystemResult, style: Style, theme: Theme
) -> None:
    counts = result.summary.collectives if result.summary else None
    if counts is None:
        return
    total = sum(each.bytes for each in counts) / _MIB
    calls = sum(each.calls for each in counts)
    axes.barh(place, total, height=_BAR, color=style.colour)
    _write(axes, total, place, f"{total:,.0f} in {calls}" if calls else "none", theme)


def _write(axes: Axes, end: float, place: int, text: str, theme: Theme) -> None:
    axes.annotate(
        text,
        (end, place),
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        color=theme.ink,
        fontsize=10,
    )
