"""Operators whose result depends on the global tensor, on local tensors: dropout, losses, views.

A plan says how their inputs are placed (`plan.annotate("attn.<op:dropout>", ...)`). They are
intercepted in the module's own code only, and not in its children's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.nn._reduction import legacy_get_string
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Site
from plan_api.ops.cross_entropy import LogitsSharding, cross_entropy
from plan_api.ops.function_calls import FunctionInterception, InterceptedCalls, TorchFunction
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.local_shards import ShardSizes, TensorSizes, chunk_length, chunk_offset
from plan_api.spec.axes import axis_names
from plan_api.static.redistribute import SiteTypes

__all__ = ["check_operators", "install_operators"]

# dist-rng may have replaced the one in torch.nn.functional; it calls this one.
_FUSED: TorchFunction = torch._C._nn.scaled_dot_product_attention


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
    stays: Callable[[str], bool],
    types: SiteTypes | None = None,
    sizes: ShardSizes | None = None,
) -> list[RemovableHandle]:
    """Installs hooks that intercept operators in a module's own code.

    Args:
        site: a site of operators.
        module: the module of the site.
        mesh: the plan's mesh.
        stays: whether the module of a path is an eager fallback.
        types: checks the types of the operators' tensors; None: they are not checked.
        sizes: knows the global sizes of uneven shards, of the whole model; None: of this site only.
    """
    axes, sizes = axis_names(mesh), sizes or ShardSizes(mesh)
    table: dict[TorchFunction, InterceptedCalls] = {}
    for step in site.steps:
        by_axis = {axes.index(axis): move.dst for axis, move in step.moves.items()}
        placements = tuple(by_axis.get(axis, Replicate()) for axis in range(mesh.ndim))
        of_tensor = sizes.at(f"{site.name}:{step.tensor}:{step.index}", placements)
        name, _, number = str(step.index).partition(":")
        for function in _functions(name, site.name):
            fused = function in (_FUSED, F.scaled_dot_product_attention)
            make = _attention if fused else _REPLACEMENTS.get(name, _with_dtensor)
            calls = table.setdefault(function, InterceptedCalls(function))
            if fused:
                table[_FUSED] = calls
            replacement = make(function, mesh, placements, of_tensor)
            if types is not None:
                replacement = types.operator(site, step, replacement)
            replacement = StepContext(site.name, step).wrap(replacement)
            calls.replacements[int(number) if number else None] = replacement
    span = FunctionInterception(table)
    handles = [
        module.register_forward_pre_hook(span.begin),
        module.register_forward_hook(span.leave, prepend=True, always_call=True),
    ]
    names = {str(step.index).partition(":")[0] for step in site.steps}
    for name, child in module.named_children():
        path = f"{site.path}.{name}" if site.path else name
        if _may_call(child, names) or stays(path):
            handles += [
                child.register_forward_pre_hook(span.leave, prepend=True),
                child.register_forward_hook(span.enter, always_call=True),
            ]
    return handles


def _may_call(child: nn.Module, names: Collection[str]) -> bool:
    """Whether a child may call one of the functions, so that it needs hooks to exclude it.

    The code of torch's own modules is inspected, as two hooks less on each save time.
    """
    own = type(child)
    if next(child.children(), None) is not None or not own.__module__.startswith("torch.nn."):
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


def _dropout(
    _: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...], sizes: TensorSizes
) -> TorchFunction:
    if "dist_rng" not in sys.modules:
        return F.dropout
    from dist_rng import Region, dropout, is_installed

    if not is_installed():
        return F.dropout

    regions: dict[tuple[torch.Size, torch.Size, tuple[int, ...]], Region] = {}

    def global_dropout(
        input: torch.Tensor,  # noqa: A002  # torch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        shape = sizes.global_shape(input)
        key = (shape, input.shape, input.stride())
        if key not in regions:
            regions[key] = Region.of(sizes.as_dtensor(input.detach(), shape))
        result = dropout(input, regions[key], p)
        return input.copy_(result) if inplace else result

    return global_dropout


def _attention(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    def without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
        if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0:
            raise NotImplementedError(
                "scaled_dot_product_attention: expected dropout_p=0 in static mode, as its fused "
                "kernel cannot draw one device's random numbers; use eager attention, "
                "attn_implementation='eager' in transformers, or mode='eager'"
            )
        result: torch.Tensor = function(*args, **kwargs)
        return result

    return without_dropout


def _cross_entropy(
    _: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...], sizes: TensorSizes
) -> TorchFunction:
    def sharded_cross_entropy(
        input: torch.Tensor,  # noqa: A002  # torch's name
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        if size_average is not None or reduce is not None or label_smoothing:
            raise NotImplementedError(
                "cross_entropy: static mode does not support label_smoothing, size_average and "
                "reduce; use mode='eager'"
            )
        dim = min(1, input.ndim - 1)
        sharding = _sharding(input, dim, mesh, placements, sizes)
        kind = ("none", "mean", "sum").index(reduction)
        return cross_entropy(input, target, weight, kind, ignore_index, sharding)

    return sharded_cross_entropy


def _sharding(
    tensor: torch.Tensor,
    dim: int,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> LogitsSharding:
    """Returns how logits or a table are sharded along a dim of classes."""
    of_classes = [
        at for at, placement in enumerate(placements) if getattr(placement, "dim", None) == dim
    ]
    rows = [
        at
        for at, placement in enumerate(placements)
        if at not in of_classes and not placement.is_replicate()
    ]
    if len(of_classes) > 1:
        raise ValueError(
            f"{sizes.what}: expected classes or rows sharded along one axis at most, got "
            f"{placements}; use mode='eager'"
        )
    if not of_classes:
        return LogitsSharding(mesh, dim, None, 0, tuple(rows))
    (axis,) = of_classes
    length = sizes.length(axis, dim, tensor)
    first = chunk_offset(length, mesh.size(axis), mesh.get_local_rank(axis))
    return LogitsSharding(mesh, dim, axis, first, tuple(rows))


def _embedding(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    """Looks up this rank's rows of a table; rows of other ranks are zero, for a Partial result."""
    shardings: dict[torch.Size, LogitsSharding] = {}

    def sharded_embedding(
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: torch.Tensor,
        *options: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if weight.shape not in shardings:
            shardings[weight.shape] = _sharding(weight, 0, mesh, placements, sizes)
        local = input - shardings[weight.shape].first
        elsewhere = (local < 0) | (local >= weight.shape[0])
        rows: torch.Tensor = function(local.masked_fill(elsewhere, 0), weight, *options, **kwargs)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return sharded_embedding


def _mean(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    """Scales a mean over local elements to this rank's term of the global mean."""
    is_functional = inspect.isfunction(function)  # torch's builtin has no signature, an enum

    def is_mean(*args: Any, **kwargs: Any) -> bool:
        if not is_functional:
            return bool((args[4] if len(args) > 4 else kwargs.get("reduction", 1)) == 1)
        bound = inspect.signature(function).bind(*args, **kwargs).arguments
        legacy = bound.get("size_average"), bound.get("reduce")
        if legacy != (None, None):  # deprecated, but torch still applies them
            return legacy_get_string(*legacy, emit_warning=False) == "mean"
        return bool(bound.get("reduction", "mean") == "mean")

    def partial_mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = function(*args, **kwargs)
        if not is_mean(*args, **kwargs):
            return loss
        local: torch.Tensor = args[0] if args else kwargs["input"]
        share = local.numel() / max(1, sizes.count(local))
        # The mean of no elements is nan, and this rank's term of the global mean is zero.
        return loss * share if share else loss.nan_to_num(0.0)

    return partial_mean


def _sized(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    """Replaces the global sizes that code passes to `view` or `reshape` by this rank's."""
    shards = _shards(placements)

    def with_local_sizes(tensor: torch.Tensor, *sizes: Any, **kwargs: Any) -> Any:
        shape = [*(sizes[0] if sizes and isinstance(sizes[0], Sequence) else sizes)]
        shape = shape or [*kwargs.pop("shape", kwargs.pop("size", ()))]
        for dim, axis in shards:
            if dim >= len(shape):  # not the annotated tensor: labels beside logits, for instance
                continue
            shape[dim] = _local_size(shape[dim], mesh, axis)
        return function(tensor, tuple(shape), **kwargs)

    return with_local_sizes


def _split(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    """Replaces the global sizes that code passes to `split` by this rank's."""
    shards = _shards(placements)

    def local_size(size: int, sharded: int) -> int:
        for dim, axis in shards:
            if dim == sharded:
                size = _local_size(size, mesh, axis)
        return size

    def with_local_sizes(tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
        sharded = dim % tensor.ndim
        if isinstance(split_size, Sequence):
            return function(tensor, [local_size(one, sharded) for one in split_size], dim)
        return function(tensor, local_size(split_size, sharded), dim)

    return with_local_sizes


def _shards(placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """Returns the sharded dims, each with the axis that shards it."""
    return [
        (dim, axis)
        for axis, placement in enumerate(placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]


def _local_size(size: int, mesh: DeviceMesh, axis: int) -> int:
    if size == -1:
        return size
    return chunk_length(size, mesh.size(axis), mesh.get_local_rank(axis))


def _with_dtensor(
    function: TorchFunction,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    sizes: TensorSizes,
) -> TorchFunction:
    """Runs any other function with its first tensor as a DTensor."""

    def with_dtensor(*args: Any, **kwargs: Any) -> Any:
        first = next((at for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)), None)
        if first is None:
            return function(*args, **kwargs)
        converted = [*args]
        converted[first] = sizes.as_dtensor(args[first])
        return map_tensors(
            function(*converted, **kwargs),
            lambda one: one.to_local() if isinstance(one, DTensor) else one,
        )

    return with_dtensor


_REPLACEMENTS: dict[
    str, Callable[[TorchFunction, DeviceMesh, tuple[Placement, ...], TensorSizes], TorchFunction]
] = {
    "dropout": _dropout,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "mse_loss": _mean,
    "l1_loss": _mean,
    "smooth_l1_loss": _mean,
    "huber_loss": _mean,
    "binary_cross_entropy": _mean,
    "binary_cross_entropy_with_logits": _mean,
    "view": _sized,
    "reshape": _sized,
    "split": _split,
}
