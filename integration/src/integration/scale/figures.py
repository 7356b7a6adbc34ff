"""Draws throughput by ranks and by model size, traffic, padding, and initialisation."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from integration.report.figures import new_figure, style_axes
from integration.report.palette import MARKERS, Theme
from integration.scale.curves import Curve
from integration.scale.dispatch import DispatchTime
from integration.scale.initialisation import Initialisation
from integration.scale.padding import Padding
from integration.scale.strategies import STRATEGIES
from integration.scale.traffic import CountedStep

__all__ = ["draw_beginning", "draw_growth", "draw_padding", "draw_strong", "draw_traffic",
           "draw_weak"]  # fmt: skip

_PLACES = {strategy.name: place for place, strategy in enumerate(STRATEGIES)}


def draw_weak(curves: Sequence[Curve], theme: Theme) -> Figure:
    """Draws tokens per second and rank, by ranks: a panel per model, a line per strategy."""
    models = _models(curves)
    figure, panels = _row(theme, len(models))
    for axes, model in zip(panels, models, strict=True):
        style_axes(axes, theme, model, grid_axis="y")
        for curve in (one for one in curves if one.model == model):
            _line(
                axes, theme, _PLACES[curve.strategy], [point.x for point in curve.points],
                [point.throughput / point.x for point in curve.points],
            )  # fmt: skip
        _ranks(axes, [point.x for point in curves[0].points])
        axes.set_ylim(0, None)
    panels[0].set_ylabel("tokens / s per rank")
    _legend(figure, theme, {curve.strategy: _PLACES[curve.strategy] for curve in curves})
    return figure


def draw_strong(curves: Sequence[Curve], theme: Theme) -> Figure:
    """Draws tokens per second by ranks, a line per batch with its fastest strategy."""
    models, labels = _models(curves), list(dict.fromkeys(curve.label for curve in curves))
    figure, panels = _row(theme, len(models))
    for axes, model in zip(panels, models, strict=True):
        style_axes(axes, theme, model, grid_axis="y")
        for place, label in enumerate(labels):
            ranks, best = fastest([c for c in curves if (c.model, c.label) == (model, label)])
            _line(axes, theme, place, ranks, best)
            ideal = [best[0] * one / ranks[0] for one in ranks]
            axes.plot(ranks, ideal, color=theme.reference, linestyle="--", linewidth=1, zorder=1)
        _log(axes)
        _ranks(axes, ranks)
    panels[0].set_ylabel("tokens / s of all ranks")
    _legend(figure, theme, {f"{label} a step": place for place, label in enumerate(labels)})
    return figure


def fastest(curves: Sequence[Curve]) -> tuple[list[float], list[float]]:
    """Returns the numbers of ranks, and the most tokens per second of any curve at each."""
    ranks = [point.x for point in curves[0].points]
    best = [max(curve.points[at].throughput for curve in curves) for at in range(len(ranks))]
    return ranks, best


def draw_growth(curves: Sequence[Curve], theme: Theme) -> Figure:
    """Draws MFU by the number of parameters, a line per strategy."""
    figure, (axes,) = _row(theme, 1)
    style_axes(axes, theme, f"{curves[0].model}, deeper and wider", grid_axis="y")
    for curve in curves:
        _line(
            axes, theme, _PLACES[curve.strategy], [point.x / 1e9 for point in curve.points],
            [100 * point.mfu for point in curve.points],
        )  # fmt: skip
    axes.set_ylim(0, None)
    axes.set_xlabel("parameters, in billions")
    axes.set_ylabel("MFU, %")
    _legend(figure, theme, {curve.strategy: _PLACES[curve.strategy] for curve in curves})
    return figure


def draw_traffic(counts: Sequence[CountedStep], theme: Theme) -> Figure:
    """Draws the bytes that a rank sends in a step, by ranks: a panel per model."""
    models = list(dict.fromkeys(one.model for one in counts))
    figure, panels = _row(theme, len(models))
    for axes, model in zip(panels, models, strict=True):
        style_axes(axes, theme, model, grid_axis="y")
        for strategy, place in _PLACES.items():
            found = [one for one in counts if (one.model, one.strategy) == (model, strategy)]
            sent = [sum(each.nbytes for each in one.whole.traffic) / 1e9 for one in found]
            _line(axes, theme, place, [one.ranks for one in found], sent)
        _log(axes)
        low, high = axes.get_ylim()  # a wider range, so that small differences do not look large
        axes.set_ylim(low / 3, high * 3)
        _ranks(axes, [one.ranks for one in counts])
    panels[0].set_ylabel("GB sent by a rank in a step")
    _legend(figure, theme, {one.strategy: _PLACES[one.strategy] for one in counts})
    return figure


def draw_padding(paddings: Sequence[Padding], theme: Theme) -> Figure:
    """Draws the share of padding by ranks: a panel per model, a line per block size."""
    models = list(dict.fromkeys(one.model for one in paddings))
    rows = list(dict.fromkeys(one.rows for one in paddings))
    figure, panels = _row(theme, len(models))
    for axes, model in zip(panels, models, strict=True):
        style_axes(axes, theme, model, grid_axis="y")
        for place, count in enumerate(rows):
            found = [one for one in paddings if (one.model, one.rows) == (model, count)]
            _line(
                axes, theme, place, [one.ranks for one in found],
                [max(100 * one.share, 1e-3) for one in found],
            )  # fmt: skip
        _log(axes)
        _ranks(axes, [one.ranks for one in paddings])
    panels[0].set_ylabel("padding, %")
    _legend(figure, theme, {f"block of {count} rows": place for place, count in enumerate(rows)})
    return figure


def draw_beginning(
    begun: Sequence[Initialisation], dispatched: Sequence[DispatchTime], theme: Theme
) -> Figure:
    """Draws seconds until the first step, and the dispatch time of a layer, by ranks."""
    panels_of = []
    for model in dict.fromkeys(one.model for one in begun):
        panels_of.append((model, "s of initialisation", [
            (one.strategy, one.ranks, one.mesh + one.model_on_meta + one.distribute)
            for one in begun if one.model == model
        ]))  # fmt: skip
    if dispatched:
        costs = [(one.strategy, one.ranks, 1e3 * one.cost) for one in dispatched]
        panels_of.append((dispatched[0].model, "ms of host time per layer", costs))
    figure, panels = _row(theme, len(panels_of))
    for axes, (title, label, values) in zip(panels, panels_of, strict=True):
        style_axes(axes, theme, title, grid_axis="y")
        axes.set_ylabel(label)
        for strategy, place in _PLACES.items():
            drawn = [one for one in values if one[0] == strategy]
            _line(axes, theme, place, [one[1] for one in drawn], [one[2] for one in drawn])
        _log(axes)
        _ranks(axes, [one[1] for one in values])
    _legend(figure, theme, {one[0]: _PLACES[one[0]] for *_, values in panels_of for one in values})
    return figure


def _row(theme: Theme, count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = new_figure(theme, 3.9)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _line(axes: Axes, theme: Theme, place: int, x: Sequence[float], y: Sequence[float]) -> None:
    axes.plot(
        x, y, color=theme.series[place % len(theme.series)], marker=MARKERS[place % len(MARKERS)],
        markersize=5, linewidth=1.8,
    )  # fmt: skip


def _log(axes: Axes) -> None:
    axes.set_yscale("log")
    numbers = FuncFormatter(lambda value, _: f"{value:,g}")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axes.yaxis.set_major_formatter(numbers)
    axes.yaxis.set_minor_locator(NullLocator())


def _ranks(axes: Axes, ranks: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    shown = sorted(set(ranks))
    axes.set_xticks(shown, [f"{one / 1024:.0f}K" if one >= 1024 else f"{one:.0f}" for one in shown])
    axes.set_xlabel("ranks")


def _legend(figure: Figure, theme: Theme, places: dict[str, int]) -> None:
    handles = [
        Line2D(
            [], [], color=theme.series[place % len(theme.series)],
            marker=MARKERS[place % len(MARKERS)], label=label,
        )
        for label, place in places.items()
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
        labelcolor=theme.ink, fontsize=9.5,
    )  # fmt: skip


def _models(curves: Sequence[Curve]) -> list[str]:
    return list(dict.fromkeys(curve.model for curve in curves))
