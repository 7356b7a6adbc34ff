"""Operators and their tensors in a few words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from plan_api.spec.placements import format_placement

__all__ = ["local_bytes", "operator_name", "placed", "shorts"]


def operator_name(func: torch._ops.OpOverload) -> str:
    """As in ``aten.addmm``, without the overload."""
    return str(func._schema.name).replace("::", ".")


def shorts(placements: Sequence[Placement]) -> str:
    """A placement per axis: ``S(0),R``."""
    return ",".join(map(format_placement, placements))


def placed(value: Any) -> str:
    """How all tensors in a value are placed; equal ones, side by side, are counted."""
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    texts = [shorts(one.placements) if isinstance(one, DTensor) else "local" for one in tensors]
    runs = [(text, len(list(same))) for text, same in itertools.groupby(texts)]
    return " ".join(text if number == 1 else f"{number}x {text}" for text, number in runs)


def local_bytes(value: Any) -> int:
    """Those of all tensors in a value, on this rank."""
    tensors = (one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor))
    locals_ = (one._local_tensor if isinstance(one, DTensor) else one for one in tensors)
    return sum(one.numel() * one.element_size() for one in locals_)
