"""The texts and colours of pictures of a tensor's parts, which all renderers use."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate

from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.grid import CellGrid
from ragged_shard.visualization.parts import RankPart, TensorParts

# Okabe and Ito's colours, which colour-blind readers can distinguish, without black.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#BBBBBB")
DARK = frozenset({"#009E73", "#D55E00", "#0072B2"})  # their text is white

_SHORT = 5  # characters of a label in a cell


def headings(tensor: TensorParts) -> tuple[str, ...]:
    """Returns the lines above the picture: the tensor and the mesh, then each axis."""
    names = tensor.axis_names or ()
    axes = [
        f"axis {n}" + (f" ({names[n]})" if names else "") for n in range(len(tensor.mesh_shape))
    ]
    return (
        f"tensor {tensor.shape} on mesh {tensor.mesh_shape}",
        *(f"  {axis}: {p!r}" for axis, p in zip(axes, tensor.placements, strict=True)),
    )


def remarks(tensor: TensorParts, cells: CellGrid) -> tuple[str, ...]:
    """Returns the notes that are needed to read the picture."""
    found = []
    if not cells.cells:
        found.append("The tensor has no elements.")
    if cells.drawn.sizes != tensor.shape:
        drawn = box_text(cells.drawn, tensor.shape)
        found.append(f"Too large to be drawn completely: this is {drawn}.")
    if cells.scaled:
        found.append("Not to scale: headings are the cells' first indices.")
    axes = list(zip(tensor.placements, tensor.mesh_shape, strict=True))
    if any(isinstance(placement, Replicate) and size > 1 for placement, size in axes):
        found.append("Where a cell has several ranks, each has a copy.")
    for axis, (placement, _) in enumerate(axes):
        if placement.is_partial():
            found.append(f"Axis {axis} is {placement!r}: its ranks have terms of the values.")
    return tuple(found)


def colour(part: int) -> str:
    """Returns the colour of a part, by its index."""
    return PALETTE[part % len(PALETTE)]


def label(ranks: Sequence[int]) -> str:
    """Returns ranks in a few characters; only the first rank if they do not fit."""
    text = ranks_text(ranks)
    return text if len(text) <= _SHORT else f"{ranks[0]}…"


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ascending ranks as ranges: ``0-3,8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def box_text(box: TensorBox, shape: Sequence[int]) -> str:
    """Formats a box as an index: ``[0:3, :]``; ``[()]`` for a scalar."""
    if not shape:
        return "[()]"
    slices = (
        ":" if n == size else f"{offset}:{offset + n}"
        for offset, n, size in zip(box.offsets, box.sizes, shape, strict=True)
    )
    return f"[{', '.join(slices)}]"


def boxes_text(part: RankPart, shape: Sequence[int], width: int) -> str:
    """Formats a part's boxes in `width` characters: the first ones, and the number of others."""
    if not part.boxes:
        return "nothing"
    if len(part.boxes) <= max(width, 1):
        complete = " ".join(box_text(box, shape) for box in part.boxes)
        if len(complete) <= width or len(part.boxes) == 1:
            return complete
    text = box_text(part.boxes[0], shape)
    for omitted in range(len(part.boxes) - 1, 0, -1):
        longer = f"{text} {box_text(part.boxes[-omitted], shape)}"
        if len(f"{longer} and {omitted - 1} more") > width:
            return f"{text} and {omitted} more"
        text = longer
    raise AssertionError(f"{part} fits into {width} characters, but did not above")


def share_text(part: RankPart, tensor: TensorParts) -> str:
    """Formats a part's share of the tensor."""
    total = sum(other.numel for other in tensor.parts)
    if not total:
        return "-"
    share = 100 * part.numel / total
    return "<0.1%" if 0 < share < 0.1 else f"{share:.1f}%"
