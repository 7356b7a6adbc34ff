"""Batch and group norm: statistics of the global tensor."""

from __future__ import annotations

from typing import Any

import torch

from plan_api.ops.function_calls import TorchFunction
from plan_api.ops.normalization import batch_norm as local_batch_norm
from plan_api.ops.normalization import groups_of_rank
from plan_api.runtime.local_shards import TensorSizes

__all__ = ["batch_norm", "group_norm"]


def batch_norm(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Normalizes by the statistics of all ranks that shard the batch; channels may be sharded."""
    mesh, placements = sizes.mesh, sizes.placements
    axes = [
        axis
        for axis, one in enumerate(placements)
        if not one.is_replicate() and not one.is_shard(1)
    ]

    def global_batch_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return local_batch_norm(function, mesh, axes, *args, **kwargs)

    return global_batch_norm


def group_norm(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Normalizes this rank's groups of channels, of which the code has the global number."""
    mesh, placements = sizes.mesh, sizes.placements

    def group_norm_of_rank(
        input: torch.Tensor,  # noqa: A002  # torch's name
        num_groups: int,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        groups = groups_of_rank(num_groups, mesh, placements)
        result: torch.Tensor = function(input, groups, *args, **kwargs)
        return result

    return group_norm_of_rank
