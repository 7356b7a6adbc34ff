"""What differs between the supported versions of torch; tests/test_compat.py has the canaries.

fused-comm has its own copy of the collectives' names: neither package depends on the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from dbuffer.shutdown import alias

# Since 2.13 the old name warns.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """`all_gather_into_tensor` under the name that this torch prefers; asynchronous."""
    work: dist.Work = _ALL_GATHER(alias(output), alias(own), group=group, async_op=True)
    return work


def reduce_scatter(
    own: torch.Tensor, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> dist.Work:
    """`reduce_scatter_tensor` under the name that this torch prefers; asynchronous."""
    work: dist.Work = _REDUCE_SCATTER(alias(own), alias(tensor), op, group=group, async_op=True)
    return work


def all_reduce(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    """`all_reduce`, asynchronous; here for its untyped result."""
    work: dist.Work = dist.all_reduce(alias(tensor), op, group=group, async_op=True)
    return work


def dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> DTensor:
    """`DTensor.from_local`, which takes the shape of a scalar, `()`, for none and guesses one.

    Args:
        local: this rank's part, which becomes the local tensor itself.
        mesh: as in `DTensor.from_local`.
        placements: as in `DTensor.from_local`.
        shape: of the global tensor.
        stride: of the global tensor.
    """
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    with torch.inference_mode(False), torch.no_grad():
        return dtensor_of(local, DTensorSpec(mesh, placements, tensor_meta=meta))


def dtensor_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Returns a DTensor that `copy.deepcopy` copies, whatever the offset of its local tensor.

    torch's DTensor has the storage offset of the local tensor that it is made from. deepcopy takes
    an offset for memory of the DTensor itself, which has none, and fails.

    Args:
        local: this rank's part, which becomes the local tensor itself.
        spec: mesh, placements, global shape, strides and dtype.
    """
    if not local.storage_offset():
        return DTensor(local, spec, requires_grad=False)
    made = DTensor(local.new_empty(0), spec, requires_grad=False)
    made._local_tensor = local
    return made
