"""Makes fused attention of DTensors work where torch's does not.

Batch and heads may be sharded, as in torch's strategies for CUDA
(torch/distributed/tensor/_ops/_matrix_ops.py):

- on CPU the fused operators get strategies, which torch lacks (`register_cpu_attention`);
- a call with a mask, or one that torch computes by its *math* backend, runs on local tensors
  (`use_local_attention`): the mask is a keyword that DTensor does not redistribute, and the math
  backend makes a causal mask that is no DTensor. On a GPU that backend is the one for grouped
  keys and values in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention import SDPBackend

__all__ = ["register_cpu_attention", "use_local_attention"]

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_BATCH, _HEADS = 0, 1  # of (batch, heads, sequence, features)


def register_cpu_attention() -> None:
    """Registers both operators; a call with a mask is an error."""
    register_sharding(_FORWARD)(_forward)
    register_sharding(_BACKWARD)(_backward)


def _placements() -> list[Placement]:
    return [Replicate(), Shard(_BATCH), Shard(_HEADS)]


def _forward(
    query: Any, key: Any, value: Any, *options: Any, attn_mask: Any = None, scale: Any = None
) -> list[Any]:
    if attn_mask is not None:
        raise NotImplementedError(
            "scaled_dot_product_attention of DTensors on CPU: expected query, key, value and mask "
            "to be DTensors with equal placements, batch or heads sharded, as attention with a "
            "mask runs on local tensors; use eager attention, attn_implementation='eager' in "
            "transformers"
        )
    rest = [None] * len(options)
    return [
        ([placement, placement], [placement, placement, placement, *rest])
        for placement in _placements()
    ]


def _backward(*arguments: Any, attn_mask: Any = None, scale: Any = None) -> list[Any]:
    rest = [None] * (len(arguments) - 6)  # grad, query, key, value, out and logsumexp are tensors
    return [([placement] * 3, [placement] * 6 + rest) for placement in _placements()]


def use_local_attention() -> Callable[[], None]:
    """Replaces `torch.nn.functional.scaled_dot_product_attention`.

    Returns:
        the inverse, which leaves a function that others have put there since.
    """
    functional: Any = nn.functional  # dist-rng may have replaced the function, too
    native: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention

    @wraps(native)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,  # scale, enable_gqa
    ) -> torch.Tensor:
        if (
            isinstance(query, DTensor)
            and dropout_p == 0.0  # ranks would draw masks of their own
            and _on_local_tensors(query, key, value, attn_mask)
            and _torch_cannot(query, key, value, attn_mask, is_causal, options)
        ):
            mask = None if attn_mask is None else _local_mask(attn_mask, query)
            local = [x.to_local() for x in (query, key, value)]  # type: ignore[attr-defined]
            out = native(*local, attn_mask=mask, is_causal=is_causal, **options)
            return _with_placements_of(query, out)
        return native(query, key, value, attn_mask, dropout_p, is_causal, **options)

    functional.scaled_dot_product_attention = scaled_dot_product_attention

    def restore() -> None:
        if functional.scaled_dot_product_attention is scaled_dot_product_attention:
            functional.scaled_dot_product_attention = native

    return restore


def _on_local_tensors(
    query: DTensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether a rank can compute its part of the result without the others."""
    if not (isinstance(key, DTensor) and isinstance(value, DTensor)):
        return False
    if not (mask is None or isinstance(mask, DTensor)) or query.ndim != 4:
        return False
    placements = query.placements
    shards_of_heads = math.prod(
        query.device_mesh.size(axis) for axis, p in enumerate(placements) if p == Shard(_HEADS)
    )
    return (
        placements == key.placements == value.placements
        and all(placement in _placements() for placement in placements)
        # Otherwise heads and the keys and values of their group may be on different ranks.
        and all(x.shape[_HEADS] % shards_of_heads == 0 for x in (query, key))
    )


def _torch_cannot(
    query: DTensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
) -> bool:
    if mask is not None:
        return True
    local = [x._local_tensor for x in (query, key, value)]  # type: ignore[attr-defined]
    choice: int = torch._fused_sdp_choice(*local, is_causal=is_causal, **options)  # type: ignore[misc]
    return choice == SDPBackend.MATH.value


def _local_mask(mask: torch.Tensor, query: DTensor) -> torch.Tensor:
    """Returns a rank's part of a mask, which may have neither batch nor heads, or 1 for them."""
    assert isinstance(mask, DTensor)
    missing = query.ndim - mask.ndim
    placements: list[Placement] = []
    for placement in query.placements:
        dim = placement.dim - missing if isinstance(placement, Shard) else -1
        placements.append(Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate())
    return mask.redistribute(placements=placements).to_local()


def _with_placements_of(query: DTensor, out: torch.Tensor) -> DTensor:
    """Returns the DTensor of the local results, whose elements are in the order of the local."""
    shape = torch.Size((*query.shape[:-1], out.shape[-1]))
    strides, stride = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=out.stride):
        strides[dim], stride = stride, stride * shape[dim]
    return DTensor.from_local(
        out, query.device_mesh, query.placements, run_check=False, shape=shape,
        stride=tuple(strides),
    )  # fmt: skip
