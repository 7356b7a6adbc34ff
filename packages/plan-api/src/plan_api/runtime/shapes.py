"""Shapes of tensors before they are placed, and parts of them that stand alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["cut", "local_shape"]


def local_shape(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """The shape of this rank's part of a tensor, for placements of any package.

    Torch's `compute_local_shape_and_global_offset` knows those that are one box; cutting a tensor
    without memory is what `parallelize` does with the tensor itself.

    Args:
        tensor: any; of a DTensor, the part that it has.
        mesh: for others.
        placements: for others, per axis.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.shape
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    # Pieces of shards are cut from these.
    shards = [Replicate() if isinstance(p, _StridedShard) else p for p in placements]
    placed = distribute_tensor(hollow, mesh, shards, src_data_rank=None)
    return placed.redistribute(placements=placements)._local_tensor.shape


def cut(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """A DTensor moved, in memory that holds no more than its part."""
    moved = tensor.redistribute(placements=placements)
    local = moved._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        moved = DTensor(local.clone(), moved._spec, requires_grad=False)
    return moved
