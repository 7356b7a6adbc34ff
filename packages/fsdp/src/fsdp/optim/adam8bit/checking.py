"""Whether an optimizer's options, parameters, gradients and loaded states are what they must be."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch.distributed.tensor import DTensor, Partial

from fsdp.optim.adam8bit.blocks import BlockLayout
from fsdp.optim.adam8bit.state import QUANTIZED, WHOLE, place_of
from fsdp.optim.tensors import placements_of

__all__ = ["check_grad", "check_group", "check_param", "check_state"]


def check_group(group: dict[str, Any]) -> None:
    """Raises where an option is out of range; makes integers plain ints.

    Raises:
        ValueError: it says which.
    """
    beta1, beta2 = group["betas"]
    numbers = {
        "lr": float(group["lr"]) >= 0,
        "betas": 0 <= beta1 < 1 and 0 <= beta2 < 1,
        "eps": group["eps"] >= 0,
        "weight_decay": group["weight_decay"] >= 0,
        "block_size": _is_integer(group["block_size"]) and group["block_size"] >= 1,
        "min_8bit_size": _is_integer(group["min_8bit_size"]) and group["min_8bit_size"] >= 0,
    }
    wants = {"betas": "two from 0 to below 1", "block_size": "an integer of at least 1"}
    wants["min_8bit_size"] = "an integer that is not negative"
    for key, fits in numbers.items():
        if not fits:
            wanted = wants.get(key, "a number that is not negative")
            raise ValueError(f"Adam8bit: {key}={group[key]!r}; wants {wanted}")
    for key in ("block_size", "min_8bit_size"):
        group[key] = operator.index(group[key])


def check_param(param: torch.Tensor, name: str) -> None:
    """Raises where a parameter cannot be optimized.

    Raises:
        ValueError: it is complex, sparse, or a sum that is not made.
    """
    if not param.is_floating_point() or param.layout is not torch.strided:
        raise ValueError(
            f"Adam8bit: parameter {name!r} is a {param.layout} tensor of {param.dtype}; wants a "
            f"dense one of real floats"
        )
    if isinstance(param, DTensor) and any(isinstance(p, Partial) for p in param.placements):
        raise ValueError(
            f"Adam8bit: parameter {name!r} is placed {param.placements}, terms of a sum; wants "
            f"shards or replicas"
        )


def check_grad(param: torch.Tensor, grad: torch.Tensor, name: Callable[[], str]) -> None:
    """Raises where a gradient does not fit its parameter.

    Raises:
        ValueError: it is sparse, or a DTensor and the parameter none, or on another mesh.
    """
    if grad.layout is not torch.strided:
        raise ValueError(f"Adam8bit: the gradient of {name()!r} is sparse; wants a dense one")
    same = isinstance(grad, DTensor) == isinstance(param, DTensor)
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        same = grad.device_mesh == param.device_mesh
    if not same:
        raise ValueError(
            f"Adam8bit: the gradient of {name()!r} is a {type(grad).__name__} and the parameter a "
            f"{type(param).__name__}; wants both plain, or both DTensors of one mesh"
        )


def check_state(
    state: dict[str, Any], param: torch.Tensor, layout: BlockLayout | None, name: str
) -> None:
    """Raises where a loaded state is not what a parameter needs.

    Raises:
        ValueError: other tensors, dtypes, shapes, or placements.
    """
    wanted = WHOLE if layout is None else QUANTIZED
    if state.keys() != {"step", *wanted} or not isinstance(state["step"], torch.Tensor):
        kind = "fp32 moments" if layout is None else "8-bit moments and their scales"
        raise ValueError(
            f"Adam8bit: the state of parameter {name!r} has {sorted(state)}; wants {kind}, "
            f"{sorted({'step', *wanted})}: min_8bit_size may be another, or the optimizer"
        )
    for key, dtype in wanted.items():
        shape, placements = tuple(param.shape), placements_of(param)
        if layout is not None:
            shape, placements = place_of(param, layout, key)
        found = state[key]
        lies = placements_of(found)
        if (tuple(found.shape), found.dtype, lies) != (shape, dtype, placements):
            raise ValueError(
                f"Adam8bit: {key} of parameter {name!r} is a {found.dtype} of {tuple(found.shape)} "
                f"placed {lies}; wants a {dtype} of {shape} placed {placements}: a state of "
                f"another layout is loaded by torch.distributed.checkpoint, which reshards it"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, SupportsIndex)
