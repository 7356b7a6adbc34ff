"""The elements of one matrix that each of 4 ranks holds, by placement.

Each rank in turn shards the matrix on a fake mesh, and the values of its local tensor say which
elements it holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from integration.gallery.picture import Picture, add_legend, as_png, gallery_figure, rank_colour
from integration.report.palette import LIGHT
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard

SHAPE = (8, 6)
_WORLD = 4


@dataclass(frozen=True)
class Panel:
    """One sharding of the matrix.

    Attributes:
        title: what the panel is called.
        mesh_shape: of 4 ranks.
        placements: one per mesh axis.
    """

    title: str
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]


def panels() -> tuple[Panel, ...]:
    """Returns the shardings that the picture shows."""
    line, square = (4,), (2, 2)
    return (
        Panel("Shard(0)", line, (Shard(0),)),
        Panel("Shard(1), uneven", line, (Shard(1),)),
        Panel("Shard(0), Shard(1)", square, (Shard(0), Shard(1))),
        Panel("Replicate()", line, (Replicate(),)),
        Panel("Partial()", line, (Partial(),)),
        Panel("Replicate(), Shard(0)", square, (Replicate(), Shard(0))),
        Panel("RaggedShard((0,),\n(1, 3, 0, 4))", line, (RaggedShard((0,), (1, 3, 0, 4)),)),
        Panel("RaggedShard((0, 1),\n(5, 11, 20, 12))", line,
              (RaggedShard((0, 1), (5, 11, 20, 12)),)),
        Panel("RaggedShard.owned_by(2, 4)", line, (RaggedShard.owned_by(2, 4),)),
        Panel("_StridedShard(0, split_factor=2),\nShard(0)", square,
              (_StridedShard(0, split_factor=2), Shard(0))),
        Panel("StridedRaggedShard((0, 1), (5, 7),\nsplit_factor=2), Shard(0)", square,
              (StridedRaggedShard((0, 1), (5, 7), split_factor=2), Shard(0))),
        Panel("InterleavedShard(0, 2)", line, (InterleavedShard(0, 2),)),
    )  # fmt: skip


def ranks_by_element(panel: Panel) -> dict[int, tuple[int, ...]]:
    """Returns the ranks whose local tensors hold each element, which is named by its flat index."""
    from testkit import each_rank

    found: dict[int, tuple[int, ...]] = {}
    for rank, mesh in each_rank(panel.mesh_shape):
        for index in _local_values(panel.placements, mesh):
            found[index] = (*found.get(index, ()), rank)
    return found


def _local_values(placements: Sequence[Placement], mesh: DeviceMesh) -> list[int]:
    matrix = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    # DTensor does not redistribute to Partial: there each local tensor is a term of every element.
    source = [each if each.is_partial() else Replicate() for each in placements]
    tensor = DTensor.from_local(matrix, mesh, source).redistribute(placements=placements)
    values: list[int] = tensor.to_local().flatten().tolist()
    return values


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Draws the matrix; an element on several ranks has all their colours.

    Terms of a sum are lighter, with a plus sign.
    """
    rows, columns = SHAPE
    is_term = any(each.is_partial() for each in panel.placements)
    for index, ranks in ranks_by_element(panel).items():
        row, column = divmod(index, columns)
        width = 1 / len(ranks)
        for place, rank in enumerate(ranks):
            axes.add_patch(
                Rectangle(
                    (column + place * width, row),
                    width,
                    1,
                    facecolor=rank_colour(rank),
                    linewidth=0,
                    alpha=0.55 if is_term else 1.0,
                )
            )
        label = "+" if is_term else str(ranks[0])
        if is_term or len(ranks) == 1:
            axes.text(column + 0.5, row + 0.54, label, ha="center", va="center",
                      color=LIGHT.ink if is_term else LIGHT.background, fontsize=8)  # fmt: skip
    for row in range(rows + 1):
        axes.axhline(row, color=LIGHT.background, linewidth=1.2)
    for column in range(columns + 1):
        axes.axvline(column, color=LIGHT.background, linewidth=1.2)
    axes.set(xlim=(0, columns), ylim=(rows, 0), aspect=0.62)
    axes.set_title(panel.title, fontsize=8.5, color=LIGHT.ink, loc="left")
    mesh = " x ".join(map(str, panel.mesh_shape))
    axes.set_xlabel(f"mesh of {mesh}", fontsize=8, color=LIGHT.muted, loc="left")
    axes.set(xticks=(), yticks=())
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw() -> bytes:
    """Draws all shardings."""
    shown = panels()
    figure = gallery_figure(8.6)
    for axes, panel in zip(figure.subplots(4, 3).flat, shown, strict=True):
        draw_panel(axes, panel)
    add_legend(
        figure, {f"rank {rank}": rank_colour(rank) for rank in range(_WORLD)}, columns=_WORLD
    )
    return as_png(figure)


PICTURE = Picture("placements.png", draw)
