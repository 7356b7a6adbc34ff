"""Appends to errors the site, the plan's entries with their lines, and the tensors.

An error keeps its identity, class and traceback: one sentence is appended to its message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from plan_api.lowering.ir import Site, SiteStep
from plan_api.spec.placements import format_placement

__all__ = [
    "StepContext", "annotate_backward_errors", "append_message", "append_site", "describe_step",
    "describe_tensors", "is_annotated",
]  # fmt: skip

# Exactly these print their first argument. Subclasses, such as torch.OutOfMemoryError or the errors
# that torch raises while tracing, may format their message themselves, and get a note instead.
_WITH_MESSAGE = (
    ValueError, TypeError, RuntimeError, IndexError, AssertionError, AttributeError,
    NotImplementedError,
)  # fmt: skip
_ANNOTATED = "_plan_api_annotated"


def append_message(error: Exception, sentence: str) -> None:
    """Appends a line to an error's message, or adds a note where that is not a plain string.

    Args:
        error: that is being raised; an annotated one is not changed.
        sentence: without a newline before it.
    """
    if is_annotated(error):
        return
    setattr(error, _ANNOTATED, True)
    message = error.args[0] if len(error.args) == 1 else None
    if type(error) in _WITH_MESSAGE and isinstance(message, str):
        error.args = (f"{message}\n{sentence}",)
    else:
        error.add_note(sentence)


def is_annotated(error: Exception) -> bool:
    """Whether `append_message` has annotated the error."""
    return hasattr(error, _ANNOTATED)


def append_site(error: Exception, site: Site, part: tuple[int | str, ...], value: Any) -> None:
    """Appends to a hook's error the entries of the plan that the hook applied.

    Args:
        error: that is being raised.
        site: of the hook.
        part: the position and name of the argument or result that was redistributed.
        value: the argument or result.
    """
    steps = [step for step in site.moved if step.index in part] or site.moved
    append_message(error, _sentence(site.name, steps, value))


@dataclass(frozen=True)
class StepContext:
    """Where a step of the plan is applied, for errors raised there.

    Attributes:
        where: the site, as messages name it.
        step: of the plan.
    """

    where: str
    step: SiteStep

    def add_to(self, error: Exception, value: Any) -> None:
        """Appends the context to an error; ``value`` holds the tensors of the failed call."""
        append_message(error, _sentence(self.where, [self.step], value))

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that its errors have this context and its arguments' tensors."""

        @functools.wraps(function, updated=())
        def called(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.add_to(error, (args, kwargs))
                raise

        return called


def annotate_backward_errors(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an autograd function's backward: errors have ``ctx.at``, a `StepContext` or None."""

    @functools.wraps(backward)
    def called(ctx: Any, *grads: Any) -> Any:
        try:
            return backward(ctx, *grads)
        except Exception as error:
            if ctx.at is not None:
                ctx.at.add_to(error, grads)
            raise

    return called


def _sentence(where: str, steps: Sequence[SiteStep], value: Any) -> str:
    entries = "; ".join(f"{step.description}: {describe_step(step)}" for step in steps)
    return f"at {where}, for {entries}; got {describe_tensors(value)}"


def describe_step(step: SiteStep) -> str:
    """Returns a step as one phrase, such as ``shard weight:0 tp=S(0)``."""
    moves = ", ".join(f"{axis}={format_placement(move.dst)}" for axis, move in step.moves.items())
    return f"{step.kind.value} {step.tensor}:{step.index} {moves}"


def describe_tensors(value: Any) -> str:
    """Returns shapes and placements of the tensors in a value; without tensors, its class."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return ", ".join(map(_tensor, tensors)) or type(value).__name__


def _tensor(tensor: torch.Tensor) -> str:
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        return f"a DTensor of {shape}, placed {', '.join(map(format_placement, tensor.placements))}"
    return f"a torch.Tensor of {shape}"
