"""States keep their dtypes when they are loaded.

torch casts every state but "step" to its parameter's dtype: codes would become floats, and scales
of bf16 parameters lose most of their bits. It leaves alone what is no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, StateDict

from fsdp.optim.tensors import local_of

__all__ = ["keep_tensors", "released"]


@dataclass(frozen=True, eq=False)
class _Kept:
    """A tensor that torch does not know for one."""

    tensor: torch.Tensor


def keep_tensors(optimizer: Optimizer, state_dict: StateDict) -> StateDict:
    """A hook before `Optimizer.load_state_dict`, the last: it hides tensors from torch."""
    states = {
        key: {name: _Kept(v) if isinstance(v, torch.Tensor) else v for name, v in state.items()}
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def released(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """The state of a parameter with its tensors again, on the parameter's device."""
    device = local_of(param).device
    return {
        key: value
        if not isinstance(value, _Kept)
        else value.tensor
        if key == "step"
        else value.tensor.to(device)
        for key, value in state.items()
    }
