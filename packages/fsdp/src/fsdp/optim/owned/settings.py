"""What is checked of an optimizer's state, and AdamW's own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["adamw_options", "check_lies_as", "check_state"]


def adamw_options(defaults: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """AdamW's options with their defaults; learning rate and weight decay are the optimizer's."""
    lr, weight_decay = defaults["lr"], defaults["weight_decay"]
    anything = [torch.zeros(1, requires_grad=True)]
    options: dict[str, Any] = dict(torch.optim.AdamW(anything, float(lr)).defaults)
    return options | {"lr": lr, "weight_decay": weight_decay, flag: False}


def check_state(
    state: Mapping[torch.Tensor, Mapping[str, Any]], names: Mapping[torch.Tensor, str], who: str
) -> None:
    """Raises where a state lies otherwise than its parameter, and could not be used with it.

    Raises:
        ValueError: naming the parameter.
    """
    for param, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and key != "step":
                what = f"{who}: {key} of parameter {names[param]!r}"
                check_lies_as(value, param, what, "the parameter is")


def check_lies_as(value: torch.Tensor, wanted: torch.Tensor, what: str, wants: str) -> None:
    """Raises where a tensor has another shape or other shards than one that is wanted.

    Args:
        value: it.
        wanted: of any values.
        what: the tensor, for the error.
        wants: before how `wanted` lies, in the error.

    Raises:
        ValueError: saying how each lies.
    """
    if _layout(value) != _layout(wanted):
        raise ValueError(
            f"{what} is {_words(value)}, and {wants} {_words(wanted)}; load states of another "
            f"layout with torch.distributed.checkpoint, which cuts them anew"
        )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, DTensor):
        return (tuple(tensor.shape),)
    local = tuple(tensor._local_tensor.shape)
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements, local


def _words(tensor: torch.Tensor) -> str:
    placed = f"placed as {tensor.placements}" if isinstance(tensor, DTensor) else "a plain tensor"
    return f"{placed} of shape {tuple(tensor.shape)}"
