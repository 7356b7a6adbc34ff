"""What is checked of SOAP's options, parameters and state."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import torch
from torch.distributed.tensor import DTensor, Shard

from fsdp.optim.owned.settings import check_lies_as

__all__ = ["check_even", "check_options", "check_own_state"]


def check_options(group: Mapping[str, Any]) -> None:
    """Raises where an option of a SOAP group is out of range.

    Raises:
        ValueError: naming it.
    """
    lr, frequency = group["lr"], group["precondition_frequency"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"SOAP: lr is a tensor of {lr.numel()} elements; wants one")
    for name in ("lr", "weight_decay", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"SOAP: {name}={group[name]}; wants 0 or more")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"SOAP: betas={group['betas']}; wants two, from 0 to below 1")
    if not isinstance(frequency, SupportsIndex) or operator.index(frequency) < 1:
        raise ValueError(f"SOAP: precondition_frequency={frequency!r}; wants steps, 1 or more")


def check_even(param: torch.Tensor, axis: int | None, name: str) -> None:
    """Raises where axes beside the cut one give ranks other numbers of rows or columns.

    Raises:
        ValueError: naming the parameter.
    """
    if not isinstance(param, DTensor):
        return
    for at, one in enumerate(param.placements):
        if at != axis and isinstance(one, Shard):
            length, ranks = param.shape[one.dim], param.device_mesh.size(at)
            if length % ranks:
                raise ValueError(
                    f"SOAP: parameter {name!r} of shape {tuple(param.shape)} is placed as "
                    f"{param.placements}, which cuts its dim {one.dim} of {length} over {ranks} "
                    f"ranks unevenly; wants equal parts"
                )


def check_own_state(
    state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], name: str
) -> None:
    """Raises where the state of a parameter is not of its blocks and on their owners.

    Args:
        state: that was loaded.
        wanted: of the same keys, of any values.
        name: of the parameter.

    Raises:
        ValueError: naming the parameter.
    """
    if state.keys() != wanted.keys():
        other = sorted(state.keys() ^ wanted.keys())[0]
        found = "has" if other in state else "lacks"
        raise ValueError(
            f"SOAP: the state of parameter {name!r} {found} {other!r}; wants that of its blocks: "
            f"was it saved with another block_size or split?"
        )
    for key, value in wanted.items():
        if key != "step":
            check_lies_as(state[key], value, f"SOAP: {key} of parameter {name!r}", "it should be")
            if state[key].dtype != value.dtype:
                raise ValueError(
                    f"SOAP: {key} of parameter {name!r} is {state[key].dtype}; wants {value.dtype}"
                )
