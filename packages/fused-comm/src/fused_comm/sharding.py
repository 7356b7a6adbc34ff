"""How torch shards a tensor along mesh axes: `torch.chunk` along one axis after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = [
    "Slices", "local_tensor", "numel", "scatter_dim", "shape_of", "shard_slices",
    "shards_are_chunks",
]  # fmt: skip

# One slice for each dim of a tensor.
Slices: TypeAlias = tuple[slice, ...]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, and a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_slices(shape: Sequence[int], splits: Sequence[tuple[int, int]], position: int) -> Slices:
    """Returns the slices that one rank's shard has of a tensor.

    Args:
        shape: of the tensor.
        splits: for each axis, in order, the dim that it shards and its number of ranks.
        position: of the rank, row-major over the axes.
    """
    coordinate = []
    for _, count in reversed(splits):
        position, index = divmod(position, count)
        coordinate.append(index)
    bounds = [(0, size) for size in shape]
    for (dim, count), index in zip(splits, reversed(coordinate), strict=True):
        begin, end = bounds[dim]
        chunk = math.ceil((end - begin) / count)
        first = min(begin + chunk * index, end)
        bounds[dim] = (first, min(first + chunk, end))
    return tuple(slice(*bound) for bound in bounds)


def shape_of(slices: Slices) -> list[int]:
    """Returns the sizes of what the slices select."""
    return [part.stop - part.start for part in slices]


def numel(slices: Slices) -> int:
    """Returns the number of elements that the slices select."""
    return math.prod(shape_of(slices))


def shards_are_chunks(
    axis: int,
    placements: Sequence[Placement | None],
    later: Sequence[Placement | None] | None = None,
) -> bool:
    """Whether the shards of an axis are chunks of the tensor that its ranks have in common.

    Torch shards a dim along the axes from left to right, so they are not where an axis further
    right shards the same dim already.

    Args:
        axis: that is Shard in ``placements``.
        placements: with that Shard.
        later: the placements of the axes on its right; by default those of ``placements``.
    """
    own = placements[axis]
    assert isinstance(own, Shard)
    right = (placements if later is None else later)[axis + 1 :]
    return not any(isinstance(other, Shard) and other.dim == own.dim for other in right)


def scatter_dim(axis: int, target: Sequence[Placement], mesh: DeviceMesh) -> int | None:
    """Returns the dim along which a reduce-scatter over an axis makes the shards of ``target``.

    None where the shards are no chunks of a rank's local tensor.
    """
    placement = target[axis]
    if type(placement) is Shard:
        return placement.dim if shards_are_chunks(axis, target) else None
    if not isinstance(placement, _StridedShard):
        return None
    # The axes on the right have sharded the dim before, as tensor parallelism beside FSDP2 does.
    right = [
        mesh.size(other)
        for other in range(axis + 1, len(target))
        if target[other] == Shard(placement.dim)
    ]
    return placement.dim if math.prod(right) == placement.split_factor else None
