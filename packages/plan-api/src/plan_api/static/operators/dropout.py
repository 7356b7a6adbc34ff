"""Dropout, and attention with dropout: each rank draws its part of one device's mask."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from plan_api.ops.attention import attention_with_dropout, draws_attention_masks
from plan_api.ops.function_calls import TorchFunction
from plan_api.runtime.local_shards import TensorSizes
from plan_api.static.shadow_model import is_fake

__all__ = ["attention", "dropout"]


def dropout(_: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Draws this rank's part of one device's mask; torch's own without dist-rng."""
    if "dist_rng" not in sys.modules:
        return F.dropout
    from dist_rng import Region, is_installed
    from dist_rng import dropout as local_dropout

    if not is_installed():
        return F.dropout

    regions: dict[tuple[torch.Size, torch.Size, tuple[int, ...]], Region] = {}

    def global_dropout(
        input: torch.Tensor,  # noqa: A002  # torch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        *,
        train: bool = True,  # the name of torch.dropout
    ) -> torch.Tensor:
        if not training or not train or p == 0.0:
            return input
        key = (sizes.global_shape(input), input.shape, input.stride())
        if key not in regions:
            # As torch's mask, which is dense also where the input is a slice of another tensor.
            regions[key] = Region.of(sizes.as_dtensor(torch.empty_like(input), key[0]))
        result = local_dropout(input, regions[key], p)
        return input.copy_(result) if inplace else result

    return global_dropout


def attention(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Draws this rank's part of the mask of attention weights, whose placements are the plan's."""
    mesh, placements = sizes.mesh, sizes.placements
    with_dropout: dict[torch.Size, TorchFunction] = {}

    def local_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor
        dropout_p = args[3] if len(args) > 3 else kwargs.get("dropout_p", 0.0)
        if dropout_p == 0.0 or is_fake(query):  # a FakeTensor draws nothing
            result = function(query, *args, **kwargs)
            return result
        if not draws_attention_masks(query):
            raise NotImplementedError(
                f"scaled_dot_product_attention: expected dropout_p=0 in static mode on "
                f"{query.device.type}, or dist-rng and a CPU, where a rank can draw its part of "
                f"one device's mask, got {dropout_p}; use eager attention, "
                f"attn_implementation='eager' in transformers"
            )
        if any(getattr(one, "dim", 0) > 1 or one.is_partial() for one in placements):
            raise ValueError(
                f"scaled_dot_product_attention with dropout: expected batch or heads sharded, "
                f"Shard(0) or Shard(1), got {placements}"
            )
        key: torch.Tensor = args[0] if args else kwargs["key"]
        weights = torch.Size((*sizes.global_shape(query)[:-1], key.shape[-2]))
        if weights not in with_dropout:
            with_dropout[weights] = attention_with_dropout(mesh, placements, weights)
        result = with_dropout[weights](query, *args, **kwargs)
        return result

    return local_attention
