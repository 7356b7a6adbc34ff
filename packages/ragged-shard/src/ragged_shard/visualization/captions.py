"""The words and colours that every picture of an ownership shares."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Replicate

from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.visualization.grid import CellGrid
from ragged_shard.visualization.parts import RankPart, TensorParts

# Okabe and Ito's colours, which the colour-blind tell apart, less black.
PALETTE = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00", "#0072B2", "#BBBBBB")
DARK = frozenset({"#009E73", "#D55E00", "#0072B2"})  # with white characters

_SHORT = 5  # characters of a label in a cell


def headings(tensor: TensorParts) -> tuple[str, ...]:
    """What the picture is of: the tensor and the mesh, then the axes."""
    names = tensor.axis_names or ()
    axes = [
        f"axis {n}" + (f" ({names[n]})" if names else "") for n in range(len(tensor.mesh_shape))
    ]
    return (
        f"tensor {tensor.shape} on mesh {tensor.mesh_shape}",
        *(f"  {axis}: {p!r}" for axis, p in zip(axes, tensor.placements, strict=True)),
    )


def remarks(tensor: TensorParts, cells: CellGrid) -> tuple[str, ...]:
    """What the reader of a picture must know."""
    found = []
    if not cells.cells:
        found.append("The tensor has no elements.")
    if cells.drawn.sizes != tensor.shape:
        drawn = box_text(cells.drawn, tensor.shape)
        found.append(f"Too fine to be drawn whole: this is {drawn}.")
    if cells.scaled:
        found.append("Not to scale: the headings are where cells begin.")
    axes = list(zip(tensor.placements, tensor.mesh_shape, strict=True))
    if any(isinstance(placement, Replicate) and size > 1 for placement, size in axes):
        found.append("Where several ranks are named, each holds a copy.")
    for axis, (placement, _) in enumerate(axes):
        if placement.is_partial():
            found.append(f"Axis {axis} is {placement!r}: its ranks hold terms of the values.")
    return tuple(found)


def colour(part: int) -> str:
    """The colour of a part, by its index."""
    return PALETTE[part % len(PALETTE)]


def label(ranks: Sequence[int]) -> str:
    """Ranks in a few characters; where they do not fit, the first, which tells them from others."""
    text = ranks_text(ranks)
    return text if len(text) <= _SHORT else f"{ranks[0]}…"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks, ascending, as a list of runs: ``0-3,8``."""
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
    """A box as an index: ``[0:3, :]``; ``[()]`` for a scalar."""
    if not shape:
        return "[()]"
    slices = (
        ":" if n == size else f"{offset}:{offset + n}"
        for offset, n, size in zip(box.offsets, box.sizes, shape, strict=True)
    )
    return f"[{', '.join(slices)}]"


def boxes_text(part: RankPart, shape: Sequence[int], width: int) -> str:
    """A part's boxes in so many characters; the first, and how many are left out."""
    if not part.boxes:
        return "nothing"
    if len(part.boxes) <= max(width, 1):
        whole = " ".join(box_text(box, shape) for box in part.boxes)
        if len(whole) <= width or len(part.boxes) == 1:
            return whole
    text = box_text(part.boxes[0], shape)
    for left in range(len(part.boxes) - 1, 0, -1):
        longer = f"{text} {box_text(part.boxes[-left], shape)}"
        if len(f"{longer} and {left - 1} more") > width:
            return f"{text} and {left} more"
        text = longer
    raise AssertionError(f"{part} fits into {width} characters and did not above")


def share_text(part: RankPart, tensor: TensorParts) -> str:
    """How much of the tensor a part is."""
    total = sum(each.numel for each in tensor.parts)
    if not total:
        return "-"
    share = 100 * part.numel / total
    return "<0.1%" if 0 < share < 0.1 else f"{share:.1f}%"
