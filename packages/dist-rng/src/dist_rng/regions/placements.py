"""The regions of torch's placements, and the part of a global tensor that a region selects."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from dist_rng.regions.region import IndexRange, Region
from dist_rng.regions.registry import register_placement


def slice_of(full: Tensor, region: Region) -> Tensor:
    """Returns the elements of a global tensor that ``region`` holds, in the local shape.

    With windows the result is flat.
    """
    for dim, pieces in enumerate(region.pieces):
        parts = [full.narrow(dim, piece.start, len(piece)) for piece in pieces]
        full = parts[0] if len(parts) == 1 else _concatenate(full, parts, dim)
    if region.windows is None:
        return full
    flat = full.reshape(-1)
    return _concatenate(flat, [flat[window.start : window.stop] for window in region.windows], 0)


def _concatenate(full: Tensor, parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)


def _replicate(region: Region, placement: Replicate, axis_size: int, axis_rank: int) -> Region:
    del placement, axis_size, axis_rank
    return region


def _partial(region: Region, placement: Partial, axis_size: int, axis_rank: int) -> Region:
    del region, axis_size, axis_rank
    raise ValueError(
        f"expected a random tensor of whole values, got one with placement {placement}, whose local"
        " values are summands; redistribute it to Replicate or Shard first"
    )


def _shard(region: Region, placement: Shard, axis_size: int, axis_rank: int) -> Region:
    size = region.grid_shape[placement.dim]
    return region.select(placement.dim, chunk(IndexRange(0, size), axis_size, axis_rank))


def _strided_shard(region: Region, placement: Any, axis_size: int, axis_rank: int) -> Region:
    size = region.grid_shape[placement.dim]
    factor = int(placement.split_factor)
    outer = [chunk(IndexRange(0, size), factor, index) for index in range(factor)]
    parts = (chunk(part, axis_size, axis_rank) for part in outer)
    return region.select(placement.dim, *parts)


def chunk(piece: IndexRange, count: int, index: int) -> IndexRange:
    """Returns part ``index`` of ``count`` as ``torch.chunk`` splits; the last ones may be empty."""
    step = -(-len(piece) // count)
    start = min(piece.start + index * step, piece.stop)
    return IndexRange(start, min(start + step, piece.stop))


register_placement(Replicate, _replicate)
register_placement(Partial, _partial)
register_placement(Shard, _shard)
register_placement(_StridedShard, _strided_shard)
