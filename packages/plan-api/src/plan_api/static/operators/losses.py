"""Losses: this rank's term of the loss of the global tensor."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn._reduction import get_enum, legacy_get_string

from plan_api.ops.autocast import cast_up
from plan_api.ops.cross_entropy import MEAN, NONE, LogitsSharding, log_likelihood_loss
from plan_api.ops.cross_entropy import cross_entropy as local_cross_entropy
from plan_api.ops.function_calls import TorchFunction
from plan_api.ops.losses import WEIGHTED_MEANS, is_mean, weighted_mean
from plan_api.runtime.local_shards import TensorSizes
from plan_api.static.operators.shards import sharding_of_classes
from plan_api.static.shadow_model import is_fake

__all__ = ["cross_entropy", "mean", "nll_loss"]


def cross_entropy(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Computes this rank's term of the loss, whose classes and rows may be sharded."""
    targets_are_local = _LocalTargets()

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
        input = cast_up(input)  # noqa: A001
        sharding = sharding_of_classes(input, min(1, input.ndim - 1), sizes)
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        kind = get_enum(reduction)
        loss: torch.Tensor
        if sharding.axis is None and targets_are_local(input, target, ignore_index):
            if not sharding.rows:
                smoothing = {"reduction": reduction, "label_smoothing": label_smoothing}
                loss = function(input, target, weight, ignore_index=ignore_index, **smoothing)
                return loss
            if not label_smoothing:
                return _loss_of_rows(function, input, target, weight, kind, ignore_index, sharding)
        return local_cross_entropy(
            input, target, weight, kind, ignore_index, sharding, label_smoothing
        )

    return sharded_cross_entropy


def nll_loss(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Computes this rank's term of the loss of log probabilities, sharded as `cross_entropy`'s."""
    targets_are_local = _LocalTargets()

    def sharded_nll_loss(
        input: torch.Tensor,  # noqa: A002  # torch's name
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        input = cast_up(input)  # noqa: A001
        sharding = sharding_of_classes(input, min(1, input.ndim - 1), sizes)
        if size_average is not None or reduce is not None:
            reduction = legacy_get_string(size_average, reduce)
        kind = get_enum(reduction)
        if sharding.axis is None and targets_are_local(input, target, ignore_index):
            if sharding.rows:
                return _loss_of_rows(function, input, target, weight, kind, ignore_index, sharding)
            loss: torch.Tensor = function(
                input, target, weight, ignore_index=ignore_index, reduction=reduction
            )
            return loss
        return log_likelihood_loss(input, target, weight, kind, ignore_index, sharding)

    return sharded_nll_loss


class _LocalTargets:
    """Whether the first targets of an operator are among its classes.

    They are not where the plan does not say that the classes are sharded. torch's function would
    fail there, on a GPU with the process: this package's has a value, which the check of the first
    step compares with Eager's on all ranks.
    """

    _are_local: bool | None = None

    def __call__(self, input: torch.Tensor, target: torch.Tensor, ignored: int) -> bool:  # noqa: A002
        if self._are_local is not None or torch.compiler.is_compiling() or is_fake(target):
            return self._are_local is not False
        counted = target[target != ignored]
        classes = input.shape[min(1, input.ndim - 1)]
        self._are_local = bool(((counted >= 0) & (counted < classes)).all())
        return self._are_local


def _loss_of_rows(
    function: TorchFunction,
    input: torch.Tensor,  # noqa: A002  # torch's name
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    sharding: LogitsSharding,
) -> torch.Tensor:
    """Computes this rank's term by torch's own function, where only rows are sharded."""
    own = "none" if reduction == NONE else "sum"
    loss: torch.Tensor = function(input, target, weight, ignore_index=ignored, reduction=own)
    if reduction == MEAN:
        loss = loss / sharding.count(target, weight, ignored, input.dtype)
    return loss


def mean(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Scales a mean over local elements to this rank's term of the global mean."""
    mesh, placements = sizes.mesh, sizes.placements
    axes = [axis for axis, one in enumerate(placements) if not one.is_replicate()]
    is_functional = inspect.isfunction(function)  # torch's builtin has no signature, an enum

    def of_global(loss: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        share = local.numel() / max(1, sizes.count(local))
        # The mean of no elements is nan, and this rank's term of the global mean is zero.
        return loss * share if share else loss.nan_to_num(0.0)

    def partial_mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor
        if not is_functional:
            loss = function(*args, **kwargs)
            is_a_mean = (args[4:5] or (kwargs.get("reduction", 1),))[0] == 1
            return of_global(loss, args[0]) if is_a_mean else loss
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
        return of_global(function(*args, **kwargs), arguments["input"])

    return partial_mean
