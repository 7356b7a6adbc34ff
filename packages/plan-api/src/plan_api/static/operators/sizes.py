"""Global sizes that a model's code passes to functions, and tables with a shard of the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from plan_api.ops.cross_entropy import LogitsSharding
from plan_api.ops.function_calls import TorchFunction
from plan_api.runtime.local_shards import TensorSizes, shard_length
from plan_api.static.operators.shards import Sharding, sharding_of_classes, shards_of

__all__ = ["embedding", "sized", "split"]


def sized(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Replaces the global sizes that code passes to `view` or `reshape` by this rank's.

    Of an empty tensor, as a rank without heads has, torch does not infer a size beside 0.
    """
    shards = shards_of(sizes)

    def with_local_sizes(tensor: torch.Tensor, *sizes: Any, **kwargs: Any) -> Any:
        shape = [*(sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes)]
        shape = shape or [*kwargs.pop("shape", kwargs.pop("size", ()))]
        for shard in shards:
            if shard.dim < len(shape):  # or labels beside the annotated logits, for instance
                shape[shard.dim] = _local_size(shape[shard.dim], shard)
        if 0 in shape and -1 in shape:
            inferred = math.prod(filter(None, tensor.shape))
            shape[shape.index(-1)] = inferred // math.prod(one for one in shape if one > 0)
        return function(tensor, tuple(shape), **kwargs)

    return with_local_sizes


def split(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Replaces the global sizes that code passes to `split` by this rank's.

    A fused projection is split into its parts, as InterleavedShard says how many there are: a rank
    that has nothing of them cannot tell by sizes.
    """
    shards = shards_of(sizes)

    def local_size(size: int, shard: Sharding) -> int:
        of_parts = _local_size(size * shard.parts, shard)
        return of_parts // shard.parts

    def with_local_sizes(tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
        for shard in shards:
            if shard.dim != dim % tensor.ndim:
                continue
            if isinstance(split_size, Sequence):
                split_size = [local_size(one, shard) for one in split_size]
            else:
                split_size = local_size(split_size, shard) or [0] * shard.parts
        return function(tensor, split_size, dim)

    return with_local_sizes


def embedding(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Looks up this rank's rows of a table; rows of other ranks are zero, for a Partial result."""
    shardings: dict[torch.Size, LogitsSharding] = {}

    def sharded_embedding(
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: torch.Tensor,
        padding_idx: int | None = None,
        *options: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if weight.shape not in shardings:
            shardings[weight.shape] = sharding_of_classes(weight, 0, sizes)
        sharding = shardings[weight.shape]
        local = input - sharding.first
        elsewhere = (local < 0) | (local >= weight.shape[0])
        if padding_idx is not None:  # the row without a gradient, which one rank has
            padding_idx = padding_idx % sharding.classes - sharding.first
            padding_idx = padding_idx if 0 <= padding_idx < weight.shape[0] else None
        rows: torch.Tensor = function(
            local.masked_fill(elsewhere, 0), weight, padding_idx, *options, **kwargs
        )
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return sharded_embedding


def _local_size(size: int, shard: Sharding) -> int:
    return size if size == -1 else shard_length(shard.placement, size, shard.ranks, shard.rank)
