"""What errors say of a plan: the site, the entries with their lines, and the tensors there.

An error keeps its object, class and traceback: a sentence is added to its message, once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plan_api.fuse import Site, Step
from plan_api.ir import short

__all__ = ["At", "add_sentence", "add_site", "asked", "described", "is_told", "tells_backward"]

# Exactly these. Others, as torch.OutOfMemoryError or those with which torch traces, may make their
# message themselves, and get a note instead.
_WITH_MESSAGE = (
    ValueError, TypeError, RuntimeError, IndexError, AssertionError, AttributeError,
    NotImplementedError,
)  # fmt: skip
_TOLD = "_plan_api_told"


def add_sentence(error: Exception, sentence: str) -> None:
    """Adds a line to an error's message, or a note where the message is not a plain string.

    Args:
        error: that is being raised; one that has a sentence stays as it is.
        sentence: without a newline before it.
    """
    if is_told(error):
        return
    setattr(error, _TOLD, True)
    message = error.args[0] if len(error.args) == 1 else None
    if type(error) in _WITH_MESSAGE and isinstance(message, str):
        error.args = (f"{message}\n{sentence}",)
    else:
        error.add_note(sentence)


def is_told(error: Exception) -> bool:
    """Whether `add_sentence` has been called for it."""
    return hasattr(error, _TOLD)


def add_site(error: Exception, site: Site, part: tuple[int | str, ...], value: Any) -> None:
    """Says of an error of a hook which entries of the plan it comes from.

    Args:
        error: that is being raised.
        site: of the hook.
        part: place and name of the argument or result that was moved.
        value: that argument or result.
    """
    steps = [step for step in site.moved if step.index in part] or site.moved
    add_sentence(error, _sentence(site.name, steps, value))


@dataclass(frozen=True)
class At:
    """A step of the plan where it is done, of which errors tell.

    Attributes:
        where: the site, in words.
        step: of the plan.
    """

    where: str
    step: Step

    def add_to(self, error: Exception, value: Any) -> None:
        """Says it of an error that is being raised; ``value`` has the tensors that were given."""
        add_sentence(error, _sentence(self.where, [self.step], value))

    def telling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose errors say it of what it was called with."""

        @functools.wraps(function, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.add_to(error, (args, kwargs))
                raise

        return called


def tells_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function, whose errors say it of ``ctx.at``, an `At` or None."""

    @functools.wraps(backward)
    def called(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except Exception as error:
            if ctx.at is not None:
                ctx.at.add_to(error, grads)
            raise

    return called


def _sentence(where: str, steps: Sequence[Step], value: Any) -> str:
    entries = "; ".join(f"{step.said}: {asked(step)}" for step in steps)
    return f"at {where}, for {entries}; got {described(value)}"


def asked(step: Step) -> str:
    """What a step does, in a few words."""
    moves = ", ".join(f"{axis}={short(move.dst)}" for axis, move in step.moves.items())
    return f"{step.act.value} {step.tensor}:{step.index} {moves}"


def described(value: Any) -> str:
    """The tensors in a value with their shapes and placements; of others the class."""
    tensors = [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]
    return ", ".join(map(_tensor, tensors)) or type(value).__name__


def _tensor(tensor: torch.Tensor) -> str:
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return f"a DTensor of {shape}, placed {', '.join(map(short, tensor.placements))}"
    return f"a torch.Tensor of {shape}"
