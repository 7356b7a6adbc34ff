"""What is said of a parameter, by its name."""

from __future__ import annotations

import math
from typing import Any

import torch

from fsdp.optim.tensors import placements_of

__all__ = ["blocks_cut", "not_finite"]


def blocks_cut(name: str, param: torch.Tensor, cut: int, group: dict[str, Any]) -> str:
    """The warning that step() will be slow, and how to make it fast."""
    size = group["block_size"]
    row = param.shape[-1] if param.ndim else 1
    rows = size // math.gcd(size, row)
    return (
        f"Adam8bit: parameter {name!r}, placed {placements_of(param)}, is cut at element {cut}, in "
        f"the middle of a block of {size}. Each step moves it and its gradient to whole blocks and "
        f"back; to save that, shard it with fsdp.fully_shard, whose shard_placement_fn gives it "
        f"Rows({rows}) or Block({size})"
    )


def not_finite(name: str) -> str:
    """The warning that a block is lost."""
    return (
        f"Adam8bit: parameter {name!r} has gradients or moments that are not finite on this rank: "
        f"whole blocks of its state are NaN from here on"
    )
