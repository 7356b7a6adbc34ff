"""The state of a parameter: tensors for each block, whole on its owner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.owned.jobs import Job
from fsdp.optim.soap.blocks import cut
from fsdp.optim.soap.eigenbasis import BlockState
from fsdp.optim.tensors import local_of
from ragged_shard import RaggedShard

__all__ = ["block_state", "new_state", "state_dtype"]

_KINDS = [field.name for field in fields(BlockState)]


def new_state(
    param: torch.Tensor, strips: Sequence[Job], size: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """What a parameter has before its first step: "step", and of block n "left.n" and so on.

    On the axis that cuts the parameter each is `RaggedShard.owned_by`. Along axes of tensor or
    expert parallelism, whose ranks have blocks of their own, block n of each is stacked.

    Args:
        param: it.
        strips: of the parameter, with owners.
        size: of blocks, at most.
        device: of the tensors.
    """
    state = {"step": torch.tensor(0.0)}
    number = 0
    for job in strips:
        rows = job.matrix.base[0]
        for columns in map(len, cut(job.matrix.base[1], size)):
            shapes = {
                "left": (rows, rows), "right": (columns, columns),
                "left_basis": (rows, rows), "right_basis": (columns, columns),
                "exp_avg": (rows, columns), "exp_avg_sq": (rows, columns),
            }  # fmt: skip
            for kind in _KINDS:
                value = _owned(param, job, shapes[kind], device)
                if kind.endswith("basis"):
                    local = local_of(value)
                    local.copy_(torch.eye(len(local), shapes[kind][1], device=device))
                state[_key(kind, number)] = value
            number += 1
    return state


def block_state(state: dict[str, torch.Tensor], number: int) -> BlockState:
    """The tensors of a block on its owner, written through."""
    return BlockState(**{kind: local_of(state[_key(kind, number)]) for kind in _KINDS})


def state_dtype(param: torch.Tensor) -> torch.dtype:
    """float32 at least: bases of fewer digits are not orthogonal."""
    return torch.promote_types(param.dtype, torch.float32)


def _key(kind: str, number: int) -> str:
    return f"{kind}.{number}"


def _owned(
    param: torch.Tensor, job: Job, shape: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Zeros, on the owner."""
    rows, columns = shape
    local = torch.zeros(
        rows if job.is_mine else 0, columns, dtype=state_dtype(param), device=device
    )
    if not isinstance(param, DTensor):
        return local
    mesh, axis = param.device_mesh, job.matrix.axis
    placements: list[Placement] = [
        Shard(0) if isinstance(one, Shard) else Replicate() for one in param.placements
    ]
    if axis is not None:
        assert job.owner is not None
        placements[axis] = RaggedShard.owned_by(job.owner, mesh.size(axis))
    stacked = math.prod(
        mesh.size(at) for at, one in enumerate(placements) if isinstance(one, Shard)
    )
    whole = torch.Size((stacked * rows, columns))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole, stride=(columns, 1)
    )
