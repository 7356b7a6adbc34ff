"""Errors of what a hook does, with the site, the plan's entry and the tensors they are about."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plan_api.fuse import Site, Step
from plan_api.ir import short

__all__ = ["error_at"]

# Exactly these are made again. Others, as torch.OutOfMemoryError or those with which torch traces,
# are caught by their class, and get a note instead.
_MADE_AGAIN = (ValueError, TypeError, RuntimeError, IndexError, AssertionError)


def error_at(error: Exception, site: Site, part: tuple[int | str, ...], value: Any) -> Exception:
    """An error of a hook, saying where in the plan it comes from.

    Args:
        error: what was raised.
        site: of the hook.
        part: place and name of the argument or result that was moved.
        value: that argument or result.

    Returns:
        one of the same class to be raised from it, or the error itself with a note.
    """
    steps = [step for step in site.moved if step.index in part] or site.moved
    asked = "; ".join(f"{step.said}: {_asked(step)}" for step in steps)
    where = f"at {site.name}, for {asked}; got {_described(value)}"
    if type(error) in _MADE_AGAIN:
        return type(error)(f"{error}\n{where}")
    error.add_note(where)
    return error


def _asked(step: Step) -> str:
    moves = ", ".join(f"{axis}={short(move.dst)}" for axis, move in step.moves.items())
    return f"{step.act.value} {step.tensor}:{step.index} {moves}"


def _described(value: Any) -> str:
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return ", ".join(map(_tensor, tensors)) or type(value).__name__


def _tensor(tensor: torch.Tensor) -> str:
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return f"a DTensor of {shape}, placed {', '.join(map(short, tensor.placements))}"
    return f"a torch.Tensor of {shape}"
