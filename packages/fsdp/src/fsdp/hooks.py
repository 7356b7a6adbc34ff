"""Hooks around the forward of modules, and autograd hooks on their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.utils import _apply_to_tensors as map_tensors

__all__ = [
    "cast_tensors",
    "in_backward",
    "map_tensors",
    "no_compile",
    "register_forward_hooks",
    "register_post_backward_hook",
    "register_pre_backward_hook",
]

P = ParamSpec("P")
R = TypeVar("R")


def no_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile from tracing a hook: the graph breaks there."""
    hidden: Callable[P, R] = _disable_dynamo(function)
    return hidden


def in_backward() -> bool:
    """Returns whether autograd's engine runs, as in a recomputation of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def cast_tensors(tensors: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating-point tensors in a structure; None casts nothing."""
    if dtype is None:
        return tensors

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tensors)


def register_pre_backward_hook(output: Any, hook: Callable[[], None]) -> None:
    """Calls a hook when the gradient of a module's output has been computed."""

    def run(gradient: torch.Tensor) -> None:
        hook()

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(run)
        return tensor

    if torch.is_grad_enabled():
        map_tensors(register, output)


def register_post_backward_hook(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], hook: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a module; calls a hook when all their gradients are computed."""
    if not torch.is_grad_enabled():
        return arguments
    inputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    map_tensors(collect, arguments)
    if not inputs:
        return arguments
    outputs = iter(_PostBackward.apply(hook, *inputs))  # type: ignore[no-untyped-call]

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(outputs) if tensor.requires_grad else tensor

    args, kwargs = map_tensors(replace, arguments)
    return args, kwargs


class _PostBackward(torch.autograd.Function):
    """Returns its inputs, and calls a hook in backward, after all their gradients."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.hook()
        return None, *gradients


def register_forward_hooks(
    modules: tuple[nn.Module, ...],
    pre_forward: Callable[..., Any],
    post_forward: Callable[..., Any],
    pending: set[nn.Module],
    cast_output: Callable[[Any], Any],
) -> None:
    """Registers hooks around the forwards of one module, or of several that count as one.

    Args:
        modules: of one call of fully_shard.
        pre_forward: runs before each forward.
        post_forward: runs after the last of them.
        pending: modules whose forward has not ended in this pass; updated by the hooks.
        cast_output: converts the outputs of the forwards before the last.
    """

    def group_pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not pending:
            pending.update(modules)
        return pre_forward(module, args, kwargs)

    def group_post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if module in pending:
            pending.remove(module)
            if not pending:
                return post_forward(module, args, output)
        return cast_output(output)

    if len(modules) > 1:
        pre_forward_hook, hook = no_compile(group_pre_forward), no_compile(group_post_forward)
    else:
        pre_forward_hook, hook = pre_forward, post_forward
    for module in modules:
        module.register_forward_pre_hook(pre_forward_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook)
