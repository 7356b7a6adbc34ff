"""Shapes of tensors before they are placed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["local_shape"]


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
    return distribute_tensor(hollow, mesh, placements, src_data_rank=None)._local_tensor.shape
