"""Optimizers that hold parameters which are no longer the model's would train nothing, silently."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["mark_stale", "stale_name", "uninstall", "watch_optimizers"]

_STALE = "_fsdp_name"  # on a parameter that optimizers must not have: what it is in the model

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_handle: RemovableHandle | None = None


def mark_stale(param: torch.Tensor, name: str) -> None:
    """Says that a parameter has become part of a group: optimizers want its shard."""
    setattr(param, _STALE, name)


def stale_name(param: torch.Tensor) -> str | None:
    """The name of a parameter that has become part of a group; None of others."""
    name: str | None = getattr(param, _STALE, None)
    return name


def watch_optimizers() -> None:
    """Looks at every optimizer once, before its first step; from the first fully_shard on."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_check)


def uninstall() -> None:
    """Takes back what `fully_shard` has changed in torch: a hook before optimizers' steps.

    Sharded models stay as they are; the next `fully_shard` registers the hook again.
    """
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (name := stale_name(param)) is not None:
                raise RuntimeError(
                    f"fsdp: {type(optimizer).__name__} has parameter {name!r} as it was before "
                    f"it was sharded, or while it was gathered, and would train nothing; build the "
                    f"optimizer after fully_shard, from the parameters of the sharded model"
                )
    _checked.add(optimizer)
