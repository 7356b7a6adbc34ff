"""Losses: this rank's term of the loss of the global tensor."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn._reduction import get_enum, legacy_get_string

from plan_api.ops.cross_entropy import LogitsSharding, log_likelihood_loss
from plan_api.ops.cross_entropy import cross_entropy as local_cross_entropy
from plan_api.ops.function_calls import TorchFunction
from plan_api.ops.losses import WEIGHTED_MEANS, is_mean, weighted_mean
from plan_api.static.operators.shards import Placements, sharding_of_classes, shards_of

__all__ = ["cross_entropy", "mean", "nll_loss"]


def cross_entropy(
    function: TorchFunction, mesh: DeviceMesh, placements: Placements
) -> TorchFunction:
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
        if target.is_floating_point():
            raise NotImplementedError(
                f"cross_entropy: expected targets that are classes, in static mode, got "
                f"probabilities of {tuple(target.shape)}; use mode='eager'"
            )
        dim = min(1, input.ndim - 1)
        if input.shape not in shardings:
            what = "cross_entropy: classes"
            shardings[input.shape] = sharding_of_classes(input, dim, mesh, placements, what)
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        sharding, kind = shardings[input.shape], get_enum(reduction)
        if label_smoothing and sharding.axis is None and not sharding.rows:
            smoothing = {"reduction": reduction, "label_smoothing": label_smoothing}
            loss: torch.Tensor = function(
                input, target, weight, ignore_index=ignore_index, **smoothing
            )
            return loss
        return local_cross_entropy(
            input, target, weight, kind, ignore_index, sharding, label_smoothing
        )

    return sharded_cross_entropy


def nll_loss(_: TorchFunction, mesh: DeviceMesh, placements: Placements) -> TorchFunction:
    """Computes this rank's term of the loss of log probabilities, sharded as `cross_entropy`'s."""
    shardings: dict[torch.Size, LogitsSharding] = {}

    def sharded_nll_loss(
        input: torch.Tensor,  # noqa: A002  # torch's name
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        if input.shape not in shardings:
            dim, what = min(1, input.ndim - 1), "nll_loss: classes"
            shardings[input.shape] = sharding_of_classes(input, dim, mesh, placements, what)
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        return log_likelihood_loss(
            input, target, weight, get_enum(reduction), ignore_index, shardings[input.shape]
        )

    return sharded_nll_loss


def mean(function: TorchFunction, mesh: DeviceMesh, placements: Placements) -> TorchFunction:
    """Scales a mean over local elements to this rank's term of the global mean."""
    share = 1 / math.prod(size for _, size in shards_of(mesh, placements))
    axes = [axis for axis, one in enumerate(placements) if not one.is_replicate()]
    is_functional = inspect.isfunction(function)  # torch's builtin has no signature, an enum

    def partial_mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor
        if not is_functional:
            loss = function(*args, **kwargs)
            return loss * share if (args[4:5] or (kwargs.get("reduction", 1),))[0] == 1 else loss
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        weight = arguments.get("weight")
        if not is_mean(arguments):
            loss = function(*args, **kwargs)
            return loss
        if weight is not None and function.__name__ in WEIGHTED_MEANS:
            if weight.requires_grad:
                raise NotImplementedError(
                    f"{function.__name__}: expected a weight without a gradient in static mode, as "
                    f"its sum is a divisor, got one that requires it; use mode='eager'"
                )
            tensors = (arguments["input"], arguments["target"], weight)
            return weighted_mean(function, *tensors, mesh, axes)
        loss = function(*args, **kwargs)
        return loss * share

    return partial_mean
