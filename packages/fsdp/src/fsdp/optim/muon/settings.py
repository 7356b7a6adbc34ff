"""What is checked of an optimizer's options and state, and AdamW's own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp.optim.muon.newton_schulz import check_adjustment

__all__ = ["adamw_options", "check_options", "check_state"]


def adamw_options(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """AdamW's options with their defaults; learning rate and weight decay are the optimizer's."""
    lr, weight_decay = defaults["lr"], defaults["weight_decay"]
    anything = [torch.zeros(1, requires_grad=True)]
    options: dict[str, Any] = dict(torch.optim.AdamW(anything, float(lr)).defaults)
    return options | {"lr": lr, "weight_decay": weight_decay, "use_muon": False}


def check_options(group: Mapping[str, Any]) -> None:
    """Raises where an option of a Muon group is out of range.

    Raises:
        ValueError: naming it.
    """
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Muon: lr is a tensor of {lr.numel()} elements; wants one")
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"Muon: {name}={group[name]}; wants 0 or more")
    if not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon: ns_steps={group['ns_steps']}; wants 1 to 99")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"Muon: ns_coefficients={group['ns_coefficients']}; wants three")
    check_adjustment(group["adjust_lr_fn"])


def check_state(
    state: Mapping[torch.Tensor, Mapping[str, Any]], names: Mapping[torch.Tensor, str]
) -> None:
    """Raises where a state lies otherwise than its parameter, and could not be used with it.

    Raises:
        ValueError: naming the parameter.
    """
    for param, values in state.items():
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or key == "step":
                continue
            if _layout(value) != _layout(param):
                raise ValueError(
                    f"Muon: {key} of parameter {names[param]!r} is {_words(value)}, and the "
                    f"parameter is {_words(param)}; load states of another layout with "
                    f"torch.distributed.checkpoint, which cuts them anew"
                )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, DTensor):
        return (tuple(tensor.shape),)
    local = tuple(tensor._local_tensor.shape)
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements, local


def _words(tensor: torch.Tensor) -> str:
    placed = f"placed as {tensor.placements}" if isinstance(tensor, DTensor) else "a plain tensor"
    return f"{placed} of shape {tuple(tensor.shape)}"
