"""Makes fused attention of DTensors work where torch's does not.

Batch and heads may be sharded, as in torch's strategies for CUDA
(torch/distributed/tensor/_ops/_matrix_ops.py):

- on CPU the fused operators get strategies, which torch lacks (`register_cpu_attention`);
- a call with a mask, or one that torch computes by its *math* backend, runs on local tensors
  (`use_local_attention`): the mask is a keyword that DTensor does not redistribute, and the math
  backend makes a causal mask that is no DTensor. On a GPU that backend is the one for grouped
  keys and values in float32;
- a call with dropout runs on local tensors on a CPU, if dist-rng is installed: their masks are
  parts of one device's (`attention_with_dropout`).
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.nn.attention import SDPBackend
from torch.overrides import handle_torch_function, has_torch_function_variadic

__all__ = [
    "attention_with_dropout", "draws_attention_masks", "register_cpu_attention",
    "use_local_attention",
]  # fmt: skip

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

    @functools.wraps(native)
    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,  # scale, enable_gqa
    ) -> torch.Tensor:
        if has_torch_function_variadic(query, key, value):
            return handle_torch_function(
                scaled_dot_product_attention, (query, key, value), query, key, value, attn_mask,
                dropout_p, is_causal, **options,
            )  # fmt: skip
        if (
            not isinstance(query, DTensor)
            or not _on_local_tensors(query, key, value, attn_mask)
            or not _torch_cannot(query, key, value, attn_mask, dropout_p, is_causal, options)
        ):
            return native(query, key, value, attn_mask, dropout_p, is_causal, **options)
        attend = native
        if dropout_p > 0.0:
            shape = torch.Size((*query.shape[:-1], key.shape[-2]))
            attend = attention_with_dropout(query.device_mesh, query.placements, shape)
        mask = None if attn_mask is None else _local_mask(attn_mask, query)
        local = [x.to_local() for x in (query, key, value)]  # type: ignore[attr-defined]
        out = attend(*local, mask, dropout_p, is_causal, **options)
        return _with_placements_of(query, out)

    functional.scaled_dot_product_attention = scaled_dot_product_attention

    def restore() -> None:
        if functional.scaled_dot_product_attention is scaled_dot_product_attention:
            functional.scaled_dot_product_attention = native

    return restore


def draws_attention_masks(query: torch.Tensor) -> bool:
    """Whether a rank can draw its part of the dropout mask that one device would draw."""
    if "dist_rng" not in sys.modules:
        return False
    from dist_rng import is_installed

    local = query._local_tensor if isinstance(query, DTensor) else query
    return is_installed() and local.device.type == "cpu"


def attention_with_dropout(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size | None = None
) -> Callable[..., torch.Tensor]:
    """Returns attention of local tensors, whose dropout masks are parts of one device's.

    Args:
        mesh: of the attention weights (batch, heads, queries, keys).
        placements: of the attention weights.
        shape: their global shape; None: all ranks have equal parts.
    """
    from dist_rng import Region
    from dist_rng import scaled_dot_product_attention as attend

    stride = None if shape is None else torch.empty(shape, device="meta").stride()

    @functools.cache
    def region(shape_of_query: torch.Size, keys: int) -> Region:
        weights = torch.empty(*shape_of_query[:-1], keys, device="meta")
        return Region.of(
            DTensor.from_local(
                weights, mesh, placements, run_check=False, shape=shape, stride=stride
            )
        )

    def local_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        weights = region(query.shape, key.shape[-2])
        return attend(query, key, value, weights, attn_mask, dropout_p, is_causal, **options)

    return local_attention


def _on_local_tensors(
    query: DTensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Whether a rank can compute its part of the result without the others."""
    if not (isinstance(key, DTensor) and isinstance(value, DTensor)):
        return False
    if not (mask is None or isinstance(mask, DTensor)) or query.ndim != 4:
        return False
    placements = query.placements
    sizes = [query.device_mesh.size(axis) for axis in range(len(placements))]
    shards_of_heads = math.prod(
        [size for size, p in zip(sizes, placements, strict=True) if p == Shard(_HEADS)]
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
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
) -> bool:
    if dropout_p > 0.0:  # elsewhere ranks would draw masks of their own
        return draws_attention_masks(query)
    if mask is not None or torch.compiler.is_compiling():  # a graph has no choice of backends
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
