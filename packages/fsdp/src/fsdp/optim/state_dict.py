"""Loads optimizer state in its own dtypes, and checks that it is sharded like its parameter.

`Optimizer.load_state_dict` casts every state tensor but "step" to the dtype of its parameter
(``_process_value_according_to_param_policy`` in torch/optim/optimizer.py). 8-bit codes would become
floats, and the scales of bfloat16 parameters would lose most of their bits. Values that are not
tensors are not cast, so tensors are wrapped while torch loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, StateDict

from fsdp.optim.tensors import local_of

__all__ = ["check_same_sharding", "check_state_sharding", "unwrap_tensors", "wrap_tensors"]


@dataclass(frozen=True, eq=False)
class _WrappedTensor:
    """Hides a tensor from the casts of `Optimizer.load_state_dict`."""

    tensor: torch.Tensor


def wrap_tensors(optimizer: Optimizer, state_dict: StateDict, prefix: str = "") -> StateDict:
    """Wraps state tensors; it is the last hook before `Optimizer.load_state_dict`.

    Args:
        optimizer: is not used; torch passes it to hooks.
        state_dict: of the optimizer.
        prefix: of the names of the tensors that are wrapped; others are cast.
    """
    states = {
        key: {
            name: _WrappedTensor(value)
            if isinstance(value, torch.Tensor) and name.startswith(prefix)
            else value
            for name, value in state.items()
        }
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def unwrap_tensors(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Unwraps the state of a parameter and moves it to the parameter's device, "step" excepted."""
    device = local_of(param).device
    return {
        key: value
        if not isinstance(value, _WrappedTensor)
        else value.tensor
        if key == "step"
        else value.tensor.to(device)
        for key, value in state.items()
    }


def check_state_sharding(
    state: Mapping[torch.Tensor, Mapping[str, Any]],
    names: Mapping[torch.Tensor, str],
    optimizer_name: str,
) -> None:
    """Checks that the state of each parameter is sharded as the parameter is.

    Args:
        state: state of each parameter; "step" is not checked.
        names: names of the parameters, for errors.
        optimizer_name: for errors.

    Raises:
        ValueError: a state tensor has another shape, mesh or placements; it names the parameter.
    """
    for param, values in state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and key != "step":
                what = f"{optimizer_name}: {key} of parameter {names[param]!r}"
                check_same_sharding(value, param, what)


def check_same_sharding(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Checks that two tensors have the same global and local shapes, mesh and placements.

    Args:
        actual: the tensor that was loaded.
        expected: a tensor of any values.
        what: description of the tensor, with which the error begins.

    Raises:
        ValueError: they differ; it describes both.
    """
    if _sharding(actual) != _sharding(expected):
        raise ValueError(
            f"{what}: expected a tensor that is {_description(expected)}, got one that is "
            f"{_description(actual)}; load state of another sharding with "
            f"torch.distributed.checkpoint, which reshards it"
        )


def _sharding(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, DTensor):
        return (tuple(tensor.shape),)
    local = tuple(tensor._local_tensor.shape)
    return tuple(tensor.shape), tensor.device_mesh, tensor.placements, local


def _description(tensor: torch.Tensor) -> str:
    placed = f"placed as {tensor.placements}" if isinstance(tensor, DTensor) else "not a DTensor"
    return f"{placed} of shape {tuple(tensor.shape)}"
