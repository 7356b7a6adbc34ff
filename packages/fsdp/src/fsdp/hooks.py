"""Tensors in the arguments and outputs of modules, and autograd's hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.utils import _apply_to_tensors as on_tensors

__all__ = [
    "after_backward",
    "before_backward",
    "cast",
    "in_backward",
    "no_compile",
    "on_group",
    "on_tensors",
]

P = ParamSpec("P")
R = TypeVar("R")


def no_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile from tracing a hook: the graph breaks there."""
    hidden: Callable[P, R] = _disable_dynamo(function)
    return hidden


def in_backward() -> bool:
    """Whether autograd's engine runs, as when activation checkpointing computes anew."""
    return bool(torch._C._current_graph_task_id() != -1)


def cast(tensors: Any, dtype: torch.dtype | None) -> Any:
    """The same structure with its floating-point tensors cast, if to anything."""
    if dtype is None:
        return tensors

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return on_tensors(one, tensors)


def before_backward(output: Any, hook: Callable[[], None]) -> None:
    """Calls a hook when the gradient of a module's output is known."""

    def run(gradient: torch.Tensor) -> None:
        hook()

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(run)
        return tensor

    if torch.is_grad_enabled():
        on_tensors(one, output)


def after_backward(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], hook: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments; calls a hook when all their gradients are known."""
    if not torch.is_grad_enabled():
        return arguments
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    on_tensors(collect, arguments)
    if not found:
        return arguments
    replaced = iter(_After.apply(hook, *found))  # type: ignore[no-untyped-call]

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(replaced) if tensor.requires_grad else tensor

    args, kwargs = on_tensors(replace, arguments)
    return args, kwargs


class _After(torch.autograd.Function):
    """Does nothing to tensors, and calls a hook when all their gradients have come by."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.hook()
        return None, *gradients


def on_group(
    modules: tuple[nn.Module, ...],
    before: Callable[..., Any],
    after: Callable[..., Any],
    left: set[nn.Module],
    partly: Callable[[Any], Any],
) -> None:
    """Registers hooks around the forwards of one module, or of several that count as one.

    Args:
        modules: of one call of fully_shard.
        before: runs before each forward.
        after: runs after the last of them.
        left: those whose forward is still to come in this pass; kept up to date here.
        partly: what becomes of the outputs of the others.
    """

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not left:
            left.update(modules)
        return before(module, args, kwargs)

    def post(module: nn.Module, args: Any, output: Any) -> Any:
        if module in left:
            left.remove(module)
            if not left:
                return after(module, args, output)
        return partly(output)

    for module in modules:
        if len(modules) == 1:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)
        else:
            module.register_forward_pre_hook(no_compile(pre), prepend=True, with_kwargs=True)
            module.register_forward_hook(no_compile(post))
