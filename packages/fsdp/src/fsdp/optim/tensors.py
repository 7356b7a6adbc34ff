"""What optimizers ask of parameters that may be DTensors, and how they call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

__all__ = ["local_of", "name_of", "placements_of", "subtract_"]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Those of a DTensor; none of others."""
    return tuple(tensor.placements) if isinstance(tensor, DTensor) else ()


def subtract_(part: torch.Tensor, update: torch.Tensor, lr: float) -> None:
    """Subtracts lr times the update, each element in float32 at least, and rounded once.

    torch's kernels of CPUs round the product of a bfloat16 or float16 as well where an element is
    left over behind whole vectors (``add_`` with ``alpha``, torch 2.13): the bits would depend on
    how a parameter is cut.

    Args:
        part: of a parameter, written to.
        update: of its shape.
        lr: the learning rate.
    """
    wide = part.to(torch.promote_types(part.dtype, torch.float32))
    part.copy_(wide.add_(update, alpha=-lr))


def name_of(group: Mapping[str, Any], index: int, i: int) -> str:
    """The name of a group's i-th parameter; its place if the optimizer was given none.

    Args:
        group: of the optimizer.
        index: the group's.
        i: the parameter's.
    """
    names = group.get("param_names")
    return f"{i} of group {index}" if names is None else str(names[i])
