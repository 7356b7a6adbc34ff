"""Draws padding against world size, and a layout, with matplotlib.

Colours are those of Okabe and Ito, which most colour-blind readers can distinguish; lines also
differ in their markers.
"""

import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragged_shard.planner.command_line.sweep import SweepPoint, percent, rows
from ragged_shard.planner.layout import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
OTHER = "#999999"
PADDING: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": "#555555",
    "hatch": "//////",
    "linewidth": 0.0,
}
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
MARKERS = "osD^vP"
#: The number of ranks in a picture of a layout; of more, the first and the last are shown.
RANKS_SHOWN = 32


def save(figure: "Figure", stem: Path) -> tuple[Path, ...]:
    """Writes a picture as ``<stem>.png`` and ``<stem>.svg``; returns the paths, in that order."""
    paths = (stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg"))
    for path in paths:
        figure.savefig(path, dpi=160, bbox_inches="tight")
    return paths


def padding_figure(points: Sequence[SweepPoint], title: str) -> "Figure":
    """Draws the padding of the whole model against the world size, a line for each block size.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    axes = figure.subplots()
    sizes = sorted({point.world_size for point in points})
    block_sizes = list(dict.fromkeys(point.rows for point in points))
    for index, (count, colour, marker) in enumerate(
        zip(block_sizes, cycle(COLOURS), cycle(MARKERS), strict=False)
    ):
        line = [point for point in points if point.rows == count]
        axes.plot(
            [point.world_size for point in line],
            [100 * point.padding_ratio for point in line],
            color=colour,
            marker=marker,
            # Later lines are drawn over earlier ones; where all are near 0, each remains visible.
            markersize=4 + 1.2 * (len(block_sizes) - 1 - index),
            linewidth=1.6,
            label=rows(count),
            clip_on=False,
            zorder=3,
        )
    axes.set_xscale("log", base=2)
    if len(sizes) <= 14:
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
    axes.set_ylim(bottom=0, top=max(1.0, axes.get_ylim()[1]))
    axes.tick_params(axis="x", pad=7)  # clear of the markers at 0
    axes.set_xlabel("FSDP group size (ranks)")
    axes.set_ylabel("padding (% of the parameters)")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    _bare(axes)
    axes.legend(title="block", loc="best", facecolor="white", edgecolor="none", framealpha=1.0)
    return figure


def layout_figure(layout: Layout, title: str) -> "Figure":
    """Draws a layout: a bar for each rank's shard, tensors coloured by kind, padding hatched.

    Tensors whose names differ only in their numbers, such as those of experts, are one kind.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = _ranks_shown(layout.world_size)
    colours = _kind_colours(layout)
    figure = Figure(figsize=(9.0, 1.6 + 0.2 * max(8, len(ranks))), layout="constrained")
    axes = figure.subplots()
    scale, unit = _unit(layout.shard_size)
    for row, rank in enumerate(ranks):
        bars: dict[str | None, list[tuple[float, float]]] = {}
        end = 0
        for part in layout.parts(rank):
            colour = colours.get(_kind(layout.specs[part.tensor].name), OTHER)
            bars.setdefault(None, []).append((end / scale, (part.offset - end) / scale))
            bars.setdefault(colour, []).append((part.offset / scale, part.interval.size / scale))
            end = part.offset + part.interval.size
        bars.setdefault(None, []).append((end / scale, (layout.shard_size - end) / scale))
        for key, spans in bars.items():
            style = PADDING if key is None else {"facecolor": key} | EDGE
            axes.broken_barh([span for span in spans if span[1]], (row - 0.4, 0.8), **style)
    axes.set_yticks(range(len(ranks)), [f"{rank:,}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0, layout.shard_size / scale)
    axes.set_xlabel(f"elements of the rank's shard{unit}")
    axes.set_ylabel("rank")
    omitted_ranks = layout.world_size - len(ranks)
    axes.set_title(
        f"{title} ({omitted_ranks:,} in the middle omitted)" if omitted_ranks else title,
        loc="left",
        fontsize=11,
    )
    _bare(axes)
    if omitted_ranks:
        omitted = len(ranks) // 2 - 0.5
        axes.axhline(omitted, color="black", linewidth=1.0, linestyle=(0, (2, 2)))
    patches = [Patch(facecolor=colour, label=kind) for kind, colour in colours.items()]
    if any(_kind(spec.name) not in colours for spec in layout.specs):
        patches.append(Patch(facecolor=OTHER, label="other tensors"))
    patches.append(Patch(label=f"padding, {percent(layout.padding_ratio)}", **PADDING))
    figure.legend(handles=patches, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _bare(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)


def _ranks_shown(world_size: int) -> list[int]:
    if world_size <= RANKS_SHOWN:
        return list(range(world_size))
    half = RANKS_SHOWN // 2
    return [*range(half), *range(world_size - half, world_size)]


def _kind(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _kind_colours(layout: Layout) -> dict[str, str]:
    """Returns the colours of the kinds with the most elements, largest first."""
    sizes: dict[str, int] = {}
    for spec in layout.specs:
        sizes[_kind(spec.name)] = sizes.get(_kind(spec.name), 0) + spec.numel
    largest = sorted(sizes, key=lambda kind: -sizes[kind])[: len(COLOURS)]
    return dict(zip(largest, COLOURS, strict=False))


def _unit(size: int) -> tuple[float, str]:
    if size >= 2_000_000:
        return 1e6, " (millions)"
    return (1e3, " (thousands)") if size >= 2_000 else (1.0, "")
