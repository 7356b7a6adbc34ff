"""Losses: this rank's term of the loss of the global tensor."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn._reduction import legacy_get_string

from plan_api.ops.cross_entropy import LogitsSharding
from plan_api.ops.cross_entropy import cross_entropy as local_cross_entropy
from plan_api.ops.function_calls import TorchFunction
from plan_api.static.operators.shards import Placements, sharding_of_classes, shards_of

__all__ = ["cross_entropy", "mean"]


def cross_entropy(_: TorchFunction, mesh: DeviceMesh, placements: Placements) -> TorchFunction:
    """Computes this rank's term of the loss, whose classes and rows may be sharded."""
    shardings: dict[torch.Size, LogitsSharding] = {}

    def sharded_cross_entropy(
        input: torch.Tensor,  # noqa: A002  # torch's name
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        if size_average is not None or reduce is not None or label_smoothing:
            raise NotImplementedError(
                "cross_entropy: static mode does not support label_smoothing, size_average and "
                "reduce; use mode='eager'"
            )
        dim = min(1, input.ndim - 1)
        if input.shape not in shardings:
            what = "cross_entropy: classes"
            shardings[input.shape] = sharding_of_classes(input, dim, mesh, placements, what)
        kind = ("none", "mean", "sum").index(reduction)
        return local_cross_entropy(
            input, target, weight, kind, ignore_index, shardings[input.shape]
        )

    return sharded_cross_entropy


def mean(function: TorchFunction, mesh: DeviceMesh, placements: Placements) -> TorchFunction:
    """Scales a mean over local elements to this rank's term of the global mean."""
    share = 1 / math.prod(size for _, size in shards_of(mesh, placements))
    is_functional = inspect.isfunction(function)  # torch's builtin has no signature, an enum

    def is_mean(*args: Any, **kwargs: Any) -> bool:
        if not is_functional:
            return bool((args[4] if len(args) > 4 else kwargs.get("reduction", 1)) == 1)
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        legacy = bound.get("size_average"), bound.get("reduce")
        if legacy != (None, None):  # deprecated, but torch still applies them
            return legacy_get_string(*legacy, emit_warning=False) == "mean"
        return bool(bound.get("reduction", "mean") == "mean")

    def partial_mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = function(*args, **kwargs)
        return loss * share if is_mean(*args, **kwargs) else loss

    return partial_mean
