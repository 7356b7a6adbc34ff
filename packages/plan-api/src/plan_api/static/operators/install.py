"""Installs the replacements of operators in the code of modules."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.attention import table_of_attention
from plan_api.lowering.ir import Site
from plan_api.ops.function_calls import (
    FunctionInterception,
    InterceptedCalls,
    TorchFunction,
    with_wrapped,
)
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import register_always_called
from plan_api.runtime.local_shards import ShardSizes, TensorSizes
from plan_api.spec.axes import axis_names
from plan_api.static.operators.dropout import attention as attention_with_dropout
from plan_api.static.operators.dropout import dropout
from plan_api.static.operators.losses import cross_entropy, mean, nll_loss
from plan_api.static.operators.normalization import batch_norm, group_norm
from plan_api.static.operators.shards import MakeReplacement
from plan_api.static.operators.sizes import embedding, sized, split
from plan_api.static.redistribute import SiteTypes

__all__ = ["check_operators", "install_operators"]


def check_operators(site: Site) -> None:
    """Checks that torch has the functions that a site of operators names.

    Raises:
        ValueError: it has no such function.
    """
    for step in site.steps:
        _functions(str(step.index).partition(":")[0], site.name)


def install_operators(
    site: Site,
    module: nn.Module,
    mesh: DeviceMesh,
    types: SiteTypes | None = None,
    sizes: ShardSizes | None = None,
    attention: InterceptedCalls | None = None,
) -> list[RemovableHandle]:
    """Installs hooks that intercept operators in a module's own code, after all hooks of children.

    Args:
        site: a site of operators.
        module: the module of the site.
        mesh: the plan's mesh.
        types: checks the types of the operators' tensors; None: they are not checked.
        sizes: knows the global sizes of uneven shards, of the whole model; None: of this site only.
        attention: what the module calls instead of attention, as its sequence is sharded.
    """
    axes, sizes = axis_names(mesh), sizes or ShardSizes(mesh)
    table: dict[TorchFunction, InterceptedCalls] = {}
    for step in site.steps:
        by_axis = {axes.index(axis): move.dst for axis, move in step.moves.items()}
        placements = tuple(by_axis.get(axis, Replicate()) for axis in range(mesh.ndim))
        of_tensor = sizes.at(f"{site.name}:{step.tensor}:{step.index}", placements)
        name, _, number = str(step.index).partition(":")
        for function in _functions(name, site.name):
            make = _REPLACEMENTS.get(function.__name__, _with_dtensor)
            calls = table.setdefault(function, InterceptedCalls(function))
            table |= dict.fromkeys(with_wrapped(function), calls)
            replacement = make(function, of_tensor)
            if types is not None:
                replacement = types.operator(site, step, replacement)
            replacement = StepContext(site.name, step).wrap(replacement)
            calls.replacements[int(number) if number else None] = replacement
    if attention is not None:  # in the same interception: only that is resumed behind a child
        table |= table_of_attention(attention)
    span = FunctionInterception(table)
    handles = [
        module.register_forward_pre_hook(span.begin),
        register_always_called(module, span.leave, prepend=True),
    ]
    names = {str(step.index).partition(":")[0] for step in site.steps}
    for child in module.children():
        # Hooks are not the module's own code: those that are there already are excluded, too.
        has_hooks = child._forward_pre_hooks or child._forward_hooks
        if has_hooks or _may_call(child, names):
            handles += [
                child.register_forward_pre_hook(span.leave, prepend=True),
                register_always_called(child, span.enter),
            ]
    return handles


def _may_call(child: nn.Module, names: Collection[str]) -> bool:
    """Whether a child may call one of the functions, so that it needs hooks to exclude it.

    The code of torch's own modules is inspected, as two hooks less on each save time.
    """
    own = type(child)
    is_torchs = own.__module__.startswith("torch.nn.") and "forward" not in vars(child)
    if next(child.children(), None) is not None or not is_torchs:
        return True
    return not set(names).isdisjoint(own.forward.__code__.co_names)


def _functions(name: str, where: str) -> list[TorchFunction]:
    """Returns all functions of this name, such as torch.reshape and Tensor.reshape."""
    found = [getattr(namespace, name, None) for namespace in (F, torch, torch.Tensor)]
    functions = [one for one in found if callable(one)]
    if name == "dropout":
        functions.append(F.scaled_dot_product_attention)  # it takes dropout_p
    if not functions:
        raise ValueError(
            f"{where}:<op:{name}>: expected a function of torch, torch.nn.functional or "
            f"torch.Tensor, got {name!r}, which none of them has"
        )
    return functions


def _with_dtensor(function: TorchFunction, sizes: TensorSizes) -> TorchFunction:
    """Runs any other function with its first tensor as a DTensor.

    What the function changes in place, or writes to ``out``, gets the result by a copy, so that
    autograd records it.
    """
    name = function.__name__
    # DTensor knows few operators in place; bernoulli has other arguments then.
    out_of_place = getattr(torch.Tensor, name.removesuffix("_"), None)
    if name.endswith("_") and out_of_place is not None and name != "bernoulli_":
        compute = out_of_place
    else:
        compute = function

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], of_copy: bool) -> Any:
        first = next((at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)), None)
        if first is None:
            return compute(*args, **kwargs)
        converted = [*args]
        local = args[first].clone() if of_copy else args[first]
        converted[first] = sizes.as_dtensor(local)
        return map_tensors(
            compute(*converted, **kwargs),
            lambda one: one.to_local() if isinstance(one, DTensor) else one,
        )

    def with_dtensor(*args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        if out is not None:
            return _assign(out, run(args, kwargs, of_copy=False))
        if _is_in_place(function, args, kwargs):
            return _assign(args[0], run(args, kwargs, of_copy=True))
        return run(args, kwargs, of_copy=False)

    return with_dtensor


def _is_in_place(function: TorchFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes its first argument, as `Tensor.add_` and `F.elu(x, inplace=True)`."""
    name = function.__name__
    if name.endswith("_") and not name.endswith("__"):
        return True
    if not inspect.isfunction(function) or "inplace" not in inspect.signature(function).parameters:
        return False
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))


def _assign(targets: Any, results: Any) -> Any:
    """Copies results to a tensor, or to a tuple of them, and returns it."""
    if isinstance(targets, torch.Tensor):
        if not targets.numel() and targets.shape != results.shape:  # as torch's out= does
            targets.resize_(results.shape)
        return targets.copy_(results)
    return tuple(map(_assign, targets, results))


_REPLACEMENTS: dict[str, MakeReplacement] = {
    "dropout": dropout,
    "scaled_dot_product_attention": attention_with_dropout,
    "cross_entropy": cross_entropy,
    "nll_loss": nll_loss,
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "embedding": embedding,
    "mse_loss": mean,
    "l1_loss": mean,
    "smooth_l1_loss": mean,
    "huber_loss": mean,
    "binary_cross_entropy": mean,
    "binary_cross_entropy_with_logits": mean,
    "view": sized,
    "reshape": sized,
    "split": split,
}
