"""Registers sharding strategies for fused attention on CPU, for which torch's DTensor has none.

Batch and heads may be sharded, as in torch's strategies for CUDA
(torch/distributed/tensor/_ops/_matrix_ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

__all__ = ["register_cpu_attention"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register_cpu_attention() -> None:
    """Registers both operators; a call with a mask is an error."""
    register_sharding(_FORWARD)(_forward)
    register_sharding(_BACKWARD)(_backward)


def _placements() -> list[Placement]:
    return [Replicate(), Shard(0), Shard(1)]  # of (batch, heads, sequence, features)


def _forward(
    query: Any, key: Any, value: Any, *options: Any, attn_mask: Any = None, scale: Any = None
) -> list[Any]:
    if attn_mask is not None:
        raise NotImplementedError(
            "scaled_dot_product_attention of DTensors on CPU: expected no mask, got one: torch "
            "does not redistribute keyword tensors there; use eager attention, "
            "attn_implementation='eager' in transformers"
        )
    rest = [None] * len(options)
    return [
        ([placement, placement], [placement, placement, placement, *rest])
        for placement in _placements()
    ]


def _backward(*arguments: Any, attn_mask: Any = None, scale: Any = None) -> list[Any]:
    rest = [None] * (len(arguments) - 6)  # grad, query, key, value, out and logsumexp are tensors
    return [([placement] * 3, [placement] * 6 + rest) for placement in _placements()]
