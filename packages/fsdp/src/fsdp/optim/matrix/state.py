"""State of a matrix that its owner has, such as SOAP's preconditioners."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.matrix.assignment import MatrixTask
from ragged_shard import RaggedShard

__all__ = ["state_dtype", "zeros_on_owner"]


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """Returns the dtype of the state: float32 or wider."""
    return torch.promote_types(param.dtype, torch.float32)


def zeros_on_owner(
    param: torch.Tensor, task: MatrixTask, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Returns zeros that the owner of a matrix has, in the dtype of `state_dtype`.

    The tensor is placed `RaggedShard.owned_by` on the shard axis. Axes whose ranks have matrices of
    their own, such as those of expert parallelism, shard dim 0, along which the state of their
    matrices is stacked; other axes replicate it. The state of a plain parameter is plain.

    Args:
        param: the parameter.
        task: the matrix and its owner.
        shape: of the state of one matrix.
        device: device of the tensor.
    """
    rows, columns = shape
    local = torch.zeros(
        rows if task.is_mine else 0, columns, dtype=state_dtype(param), device=device
    )
    if not isinstance(param, DTensor):
        return local
    mesh, axis, stacked = param.device_mesh, task.matrix.axis, task.matrix.distinct_axes
    placements: list[Placement] = [
        Shard(0) if n in stacked else Replicate() for n in range(mesh.ndim)
    ]
    if axis is not None:
        assert task.owner is not None
        placements[axis] = RaggedShard.owned_by(task.owner, mesh.size(axis))
    global_shape = torch.Size((math.prod(mesh.size(n) for n in stacked) * rows, columns))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=global_shape, stride=(columns, 1)
    )
