"""Checks options, parameters and loaded state of SOAP."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch

from fsdp.optim.state_dict import check_same_sharding

__all__ = ["check_block_state", "check_options"]


def check_options(group: Mapping[str, Any]) -> None:
    """Checks the options of a group of matrices.

    Raises:
        ValueError: an option is out of range; it names the option.
    """
    lr, frequency = group["lr"], group["precondition_frequency"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"SOAP: expected lr to have one element, got {lr.numel()}")
    for name in ("lr", "weight_decay", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"SOAP: expected {name} to be 0 or more, got {group[name]}")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(
            f"SOAP: expected betas to be two numbers from 0 to below 1, got {group['betas']}"
        )
    if not isinstance(frequency, SupportsIndex) or operator.index(frequency) < 1:
        raise ValueError(
            f"SOAP: expected precondition_frequency to be an integer of at least 1, got "
            f"{frequency!r}"
        )


def check_block_state(
    state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], name: str
) -> None:
    """Checks that loaded state is that of the parameter's blocks, on their owners.

    Args:
        state: the loaded state.
        expected: state with the right keys, dtypes, shapes and placements, and any values.
        name: name of the parameter.

    Raises:
        ValueError: keys, dtypes, shapes or placements differ; it names the parameter.
    """
    if state.keys() != expected.keys():
        other = sorted(state.keys() ^ expected.keys())[0]
        verb = "has" if other in state else "lacks"
        raise ValueError(
            f"SOAP: expected the state of the blocks of parameter {name!r}, got one that {verb} "
            f"{other!r}; was it saved with another block_size or split?"
        )
    for key, value in expected.items():
        if key != "step":
            check_same_sharding(state[key], value, f"SOAP: {key} of parameter {name!r}")
            if state[key].dtype != value.dtype:
                raise ValueError(
                    f"SOAP: expected {key} of parameter {name!r} to be {value.dtype}, got "
                    f"{state[key].dtype}"
                )
