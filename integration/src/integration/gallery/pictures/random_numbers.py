"""Dropout masks of one device and of 4 ranks, which draw with torch alone and with dist-rng."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import dropout

from integration.gallery.picture import Picture, add_legend, as_png, gallery_figure, rank_colour
from integration.report.palette import LIGHT

SHAPE = (8, 20)
RANKS = 4
SEED = 5


def one_device() -> torch.Tensor:
    """Returns the mask of one device: True where an element is kept."""
    torch.manual_seed(SEED)
    return dropout(torch.ones(SHAPE), 0.5) != 0


def sharded(*, use_dist_rng: bool) -> torch.Tensor:
    """Returns the masks of all ranks, one below the other; each rank has some of the rows."""
    import dist_rng
    from testkit import each_rank

    rows: list[torch.Tensor] = []
    for _, mesh in each_rank((RANKS,)):
        if use_dist_rng:
            dist_rng.install()
        try:
            rows.append(_local_mask(mesh))
        finally:
            if use_dist_rng:
                dist_rng.uninstall()
    return torch.cat(rows)


def _local_mask(mesh: DeviceMesh) -> torch.Tensor:
    tensor = DTensor.from_local(torch.ones(SHAPE[0] // RANKS, SHAPE[1]), mesh, [Shard(0)])
    torch.manual_seed(SEED)
    dropped = dropout(tensor, 0.5)
    assert isinstance(dropped, DTensor)
    return dropped.to_local() != 0


def _draw_panel(axes: Axes, title: str, mask: torch.Tensor, colours: Sequence[str]) -> None:
    """Draws kept elements, each row in its colour."""
    image = np.full((*SHAPE, 3), to_rgb(LIGHT.grid))
    for row, colour in enumerate(colours):
        image[row, mask[row].numpy()] = to_rgb(colour)
    axes.imshow(image, aspect="auto")
    axes.set_xticks(np.arange(-0.5, SHAPE[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, SHAPE[0]), minor=True)
    axes.grid(which="minor", color=LIGHT.background, linewidth=1.2)
    axes.tick_params(which="both", length=0)
    axes.set(xticks=(), yticks=())
    axes.set_title(title, loc="left", fontsize=10, color=LIGHT.ink)
    for spine in axes.spines.values():
        spine.set_visible(False)


def draw() -> bytes:
    """Draws the three masks."""
    figure = gallery_figure(5.6)
    by_rank = [rank_colour(row * RANKS // SHAPE[0]) for row in range(SHAPE[0])]
    panels = figure.subplots(3, 1)
    _draw_panel(panels[0], "one device", one_device(), [LIGHT.ink] * SHAPE[0])
    with_rng, native = sharded(use_dist_rng=True), sharded(use_dist_rng=False)
    _draw_panel(panels[1], "4 ranks, dist-rng: the mask of one device", with_rng, by_rank)
    _draw_panel(
        panels[2],
        "4 ranks, torch's DTensor on a CPU mesh: ranks repeat each other",
        native,
        by_rank,
    )
    add_legend(figure, {f"rank {rank}": rank_colour(rank) for rank in range(RANKS)}, columns=RANKS)
    return as_png(figure)


PICTURE = Picture("random_numbers.png", draw)
