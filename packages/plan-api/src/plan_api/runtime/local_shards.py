"""The local shards of tensors: their shapes, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["local_shape", "redistribute_compact"]


def local_shape(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Size:
    """Returns the shape of this rank's shard of a tensor, for placements of any package.

    Torch's `compute_local_shape_and_global_offset` takes placements whose shard is one box;
    distributing a tensor on ``meta`` is what `parallelize` does with the tensor itself.

    Args:
        tensor: any; for a DTensor, the shape of its local tensor is returned.
        mesh: for other tensors.
        placements: for other tensors, one per axis.
    """
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.shape
    hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    # A strided shard subdivides a shard that is replicated so far.
    shards = [Replicate() if isinstance(p, _StridedShard) else p for p in placements]
    placed = distribute_tensor(hollow, mesh, shards, src_data_rank=None)
    return placed.redistribute(placements=placements)._local_tensor.shape


def redistribute_compact(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Redistributes a DTensor, into storage that holds its local shard only."""
    moved = tensor.redistribute(placements=placements)
    local = moved._local_tensor
    if local.untyped_storage().nbytes() > local.nbytes:
        moved = DTensor(local.clone(), moved._spec, requires_grad=False)
    return moved
