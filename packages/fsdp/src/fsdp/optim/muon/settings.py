"""What is checked of Muon's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdp.optim.muon.newton_schulz import check_adjustment

__all__ = ["check_options"]


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
