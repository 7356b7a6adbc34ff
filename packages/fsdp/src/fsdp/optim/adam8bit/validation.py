"""Checks options, parameters, gradients and loaded state of Adam8bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch.distributed.tensor import DTensor, Partial

from fsdp.optim.adam8bit.state import FP32_STATE, QUANTIZED_STATE, BlockLayout, state_sharding
from fsdp.optim.tensors import placements_of

__all__ = ["check_grad", "check_group", "check_param", "check_state"]

_EXPECTED = {
    "betas": "two numbers from 0 to below 1",
    "block_size": "an integer of at least 1",
    "min_8bit_size": "an integer that is not negative",
}


def check_group(group: dict[str, Any]) -> None:
    """Checks the options of a parameter group, and converts integers to int.

    Raises:
        ValueError: an option is out of range; it names the option.
    """
    beta1, beta2 = group["betas"]
    is_valid = {
        "lr": float(group["lr"]) >= 0,
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "block_size": _is_integer(group["block_size"]) and group["block_size"] >= 1,
        "min_8bit_size": _is_integer(group["min_8bit_size"]) and group["min_8bit_size"] >= 0,
    }
    for key, valid in is_valid.items():
        if not valid:
            expected = _EXPECTED.get(key, "a number that is not negative")
            raise ValueError(f"Adam8bit: expected {key} to be {expected}, got {group[key]!r}")
    for key in ("block_size", "min_8bit_size"):
        group[key] = operator.index(group[key])


def check_param(param: torch.Tensor, name: str) -> None:
    """Checks that a parameter can be optimized.

    Raises:
        ValueError: the parameter is complex or sparse, or has a Partial placement.
    """
    if not param.is_floating_point() or param.layout is not torch.strided:
        raise ValueError(
            f"Adam8bit: expected parameter {name!r} to be a dense tensor of real floats, got a "
            f"{param.layout} tensor of {param.dtype}"
        )
    if isinstance(param, DTensor) and any(isinstance(p, Partial) for p in param.placements):
        raise ValueError(
            f"Adam8bit: expected parameter {name!r} to be sharded or replicated, got placements "
            f"{param.placements}"
        )


def check_grad(param: torch.Tensor, grad: torch.Tensor, name: Callable[[], str]) -> None:
    """Checks that a gradient matches its parameter.

    Raises:
        ValueError: the gradient is sparse, or only one of the two is a DTensor, or their meshes
            differ.
    """
    if grad.layout is not torch.strided:
        raise ValueError(
            f"Adam8bit: expected a dense gradient of parameter {name()!r}, got a {grad.layout} one"
        )
    same = isinstance(grad, DTensor) == isinstance(param, DTensor)
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        same = grad.device_mesh == param.device_mesh
    if not same:
        raise ValueError(
            f"Adam8bit: expected parameter {name()!r} and its gradient to be DTensors of one mesh, "
            f"or both plain tensors, got a {type(param).__name__} and a {type(grad).__name__}"
        )


def check_state(
    state: dict[str, Any], param: torch.Tensor, layout: BlockLayout | None, name: str
) -> None:
    """Checks that loaded state is the state that a parameter needs.

    Raises:
        ValueError: keys, dtypes, shapes or placements differ; it names the parameter.
    """
    dtypes = FP32_STATE if layout is None else QUANTIZED_STATE
    if state.keys() != {"step", *dtypes} or not isinstance(state["step"], torch.Tensor):
        kind = "fp32 moments" if layout is None else "8-bit moments and their scales"
        raise ValueError(
            f"Adam8bit: expected the state of parameter {name!r} to have {kind}, "
            f"{sorted({'step', *dtypes})}, got {sorted(state)}; was it saved with another "
            f"min_8bit_size, or by another optimizer?"
        )
    for key, dtype in dtypes.items():
        shape, placements = tuple(param.shape), placements_of(param)
        if layout is not None:
            shape, placements = state_sharding(param, layout, key)
        loaded = state[key]
        actual = tuple(loaded.shape), loaded.dtype, placements_of(loaded)
        if actual != (shape, dtype, placements):
            raise ValueError(
                f"Adam8bit: expected {key} of parameter {name!r} to be {dtype} of shape {shape} "
                f"placed as {placements}, got {loaded.dtype} of shape {tuple(loaded.shape)} placed "
                f"as {placements_of(loaded)}; load state of another sharding with "
                f"torch.distributed.checkpoint, which reshards it"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex)
