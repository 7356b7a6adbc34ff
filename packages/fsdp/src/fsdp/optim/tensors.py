"""Helpers of the optimizers for parameters that may be DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["local_of", "parameter_name", "placements_of", "subtract_"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a DTensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Returns the placements of a DTensor, or an empty tuple."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


def subtract_(local: torch.Tensor, update: torch.Tensor, lr: float) -> None:
    """Subtracts ``lr * update`` in place, in float32 or wider, rounding each element once.

    The CPU kernel of ``add_(alpha=...)`` (torch 2.13) also rounds the product of a bfloat16 or
    float16 element that is left over after the last full vector, so its bits would depend on how
    the parameter is sharded.

    Args:
        local: this rank's elements of a parameter; they are updated.
        update: the same shape.
        lr: learning rate.
    """
    result = local.to(torch.promote_types(local.dtype, torch.float32))
    local.copy_(result.add_(update, alpha=-lr))


def parameter_name(group: Mapping[str, Any], group_index: int, param_index: int) -> str:
    """Returns a parameter's name, or its position if the optimizer was built without names.

    Args:
        group: the parameter group.
        group_index: index of the group in the optimizer.
        param_index: index of the parameter in the group.
    """
    names = group.get("param_names")
    return f"{param_index} of group {group_index}" if names is None else str(names[param_index])
