"""Operators in static mode whose result depends on the whole: random ones, and losses.

A plan says how they are given their inputs (`plan.annotate("attn.<op:dropout>", ...)`). They are
caught in the module's own code only, and not in its children's.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn._reduction import legacy_get_string
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import Site
from plan_api.ops.cross_entropy import LogitsSharding, cross_entropy
from plan_api.ops.function_calls import FunctionInterception, InterceptedCalls, TorchFunction
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.local_redistribute import local_redistribution
from plan_api.spec.axes import axis_names
from plan_api.static.fake import is_fake

__all__ = ["check_operators", "install_operators"]

# That of torch.nn.functional may be dist-rng's, which calls this one.
_FUSED: TorchFunction = torch._C._nn.scaled_dot_product_attention


def check_operators(site: Site) -> None:
    """Looks for the functions that a site of operators names.

    Raises:
        ValueError: torch has no such function.
    """
    for step in site.steps:
        _functions(str(step.index).partition(":")[0], site.name)


def install_operators(
    site: Site, module: nn.Module, mesh: DeviceMesh, stays: Callable[[str], bool]
) -> list[RemovableHandle]:
    """Catches operators in a module's own code.

    Args:
        site: of operators.
        module: the site's.
        mesh: the plan's.
        stays: whether a module, by its path, is on DTensors.
    """
    axes = axis_names(mesh)
    table: dict[TorchFunction, InterceptedCalls] = {}
    for step in site.steps:
        placed = {axes.index(axis): move.dst for axis, move in step.moves.items()}
        placements = tuple(placed.get(axis, Replicate()) for axis in range(mesh.ndim))
        name, _, number = str(step.index).partition(":")
        for function in _functions(name, site.name):
            fused = function in (_FUSED, F.scaled_dot_product_attention)
            make = _attention if fused else _MADE.get(name, _on_dtensors)
            calls = table.setdefault(function, InterceptedCalls(function))
            if fused:
                table[_FUSED] = calls
            made = StepContext(site.name, step).wrap(make(function, mesh, placements))
            calls.replacements[int(number) if number else None] = made
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
    """Whether functions may be called in it; of torch's own modules their code tells.

    To leave a child alone costs nothing, to tell it apart two hooks.
    """
    own = type(child)
    if next(child.children(), None) is not None or not own.__module__.startswith("torch.nn."):
        return True
    return not set(names).isdisjoint(own.forward.__code__.co_names)


def _functions(name: str, where: str) -> list[TorchFunction]:
    """All that goes by a name: torch.reshape is one thing, Tensor.reshape another."""
    found = [getattr(place, name, None) for place in (F, torch, torch.Tensor)]
    functions = [one for one in found if callable(one)]
    if name == "dropout":
        functions.append(F.scaled_dot_product_attention)  # which has one of its own
    if not functions:
        raise ValueError(
            f"{where}:<op:{name}>: there is no such function in torch, torch.nn.functional or "
            f"torch.Tensor"
        )
    return functions


def _dropout(
    _: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    if "dist_rng" not in sys.modules:
        return F.dropout
    from dist_rng import Region, dropout, is_installed

    if not is_installed():
        return F.dropout

    regions: dict[tuple[torch.Size, tuple[int, ...]], Region] = {}

    def dropped(
        input: torch.Tensor,  # noqa: A002  # torch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or p == 0.0:
            return input
        key = (input.shape, input.stride())
        if key not in regions:
            regions[key] = Region.of(_as_dtensor(input.detach(), mesh, placements))
        result = dropout(input, regions[key], p)
        return input.copy_(result) if inplace else result

    return dropped


def _attention(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    def attended(*args: Any, **kwargs: Any) -> torch.Tensor:
        if (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0.0:
            raise NotImplementedError(
                "scaled_dot_product_attention with dropout_p > 0 draws in a fused kernel, which "
                "static mode cannot make draw one device's numbers: use eager attention, "
                "attn_implementation='eager' in transformers, or mode='eager'"
            )
        result: torch.Tensor = function(*args, **kwargs)
        return result

    return attended


def _cross_entropy(
    _: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    cuts: dict[torch.Size, LogitsSharding] = {}

    def computed(
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
                "cross_entropy in static mode knows no label_smoothing, size_average or reduce: "
                "use mode='eager'"
            )
        dim = min(1, input.ndim - 1)
        if input.shape not in cuts:
            cuts[input.shape] = _cut(input, dim, mesh, placements, "cross_entropy: classes")
        kind = ("none", "mean", "sum").index(reduction)
        return cross_entropy(input, target, weight, kind, ignore_index, cuts[input.shape])

    return computed


def _cut(
    tensor: torch.Tensor,
    dim: int,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    what: str,
) -> LogitsSharding:
    """How logits or a table are cut along classes; these may be uneven, so ranks tell how many."""
    of_classes = [at for at, one in enumerate(placements) if getattr(one, "dim", None) == dim]
    rows = [
        at for at, one in enumerate(placements) if at not in of_classes and not one.is_replicate()
    ]
    if len(of_classes) > 1:
        raise ValueError(f"{what} are cut along several axes, {placements}: use mode='eager'")
    if not of_classes:
        return LogitsSharding(mesh, dim, None, 0, tuple(rows))
    (axis,) = of_classes
    own = torch.tensor([tensor.shape[dim]], device=tensor.device)
    gather = local_redistribution(Shard(0), Replicate(), mesh, axis, "lengths of shards")
    rank = mesh.get_local_rank(axis)
    if is_fake(tensor):
        return LogitsSharding(mesh, dim, axis, rank * tensor.shape[dim], tuple(rows))
    lengths = gather(own).tolist()
    return LogitsSharding(mesh, dim, axis, sum(lengths[:rank]), tuple(rows))


def _embedding(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    """Of a table whose rows are cut: what other ranks have is zero, a term of the sum."""
    cuts: dict[torch.Size, LogitsSharding] = {}

    def looked_up(
        input: torch.Tensor,  # noqa: A002  # torch's name
        weight: torch.Tensor,
        *options: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if weight.shape not in cuts:
            cuts[weight.shape] = _cut(weight, 0, mesh, placements, "embedding: rows")
        own = input - cuts[weight.shape].first
        elsewhere = (own < 0) | (own >= weight.shape[0])
        found: torch.Tensor = function(own.masked_fill(elsewhere, 0), weight, *options, **kwargs)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    return looked_up


def _mean(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    """A mean over elements: this rank's share of it, a term of the sum over the ranks."""
    share = 1 / math.prod(size for _, size in _parts(mesh, placements))
    of_functional = inspect.isfunction(function)  # torch's own has no signature, and a number

    def is_mean(*args: Any, **kwargs: Any) -> bool:
        if not of_functional:
            return bool((args[4] if len(args) > 4 else kwargs.get("reduction", 1)) == 1)
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        legacy = given.get("size_average"), given.get("reduce")
        if legacy != (None, None):  # which torch deprecates, and heeds
            return legacy_get_string(*legacy, emit_warning=False) == "mean"
        return bool(given.get("reduction", "mean") == "mean")

    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = function(*args, **kwargs)
        return loss * share if is_mean(*args, **kwargs) else loss

    return computed


def _sized(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    """`view`, `reshape`: the code says the sizes of the whole, and each rank makes its part."""
    parts = _parts(mesh, placements)

    def called(tensor: torch.Tensor, *sizes: Any, **kwargs: Any) -> Any:
        given = [*(sizes[0] if sizes and isinstance(sizes[0], Sequence) else sizes)]
        given = given or [*kwargs.pop("shape", kwargs.pop("size", ()))]
        for dim, by in parts:
            if dim >= len(given):  # another tensor than is meant, such as labels beside logits
                continue
            given[dim] = _part(given[dim], by, function)
        return function(tensor, tuple(given), **kwargs)

    return called


def _split(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    """The code says how long pieces of the whole are."""
    parts = dict(_parts(mesh, placements))

    def called(tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
        by = parts.get(dim % tensor.ndim, 1)
        if isinstance(split_size, Sequence):
            return function(tensor, [_part(one, by, function) for one in split_size], dim)
        return function(tensor, _part(split_size, by, function), dim)

    return called


def _parts(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[tuple[int, int]]:
    """Which dims are cut, and by how many."""
    return [
        (dim, mesh.size(axis))
        for axis, placement in enumerate(placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]


def _part(size: int, by: int, function: TorchFunction) -> int:
    if size == -1:
        return size
    if size % by:
        raise ValueError(
            f"{function.__name__} in static mode: a size of {size} cannot be cut into {by}: shards "
            f"are even; use mode='eager'"
        )
    return size // by


def _on_dtensors(
    function: TorchFunction, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> TorchFunction:
    """Any other function: its first tensor is a DTensor while it runs."""

    def called(*args: Any, **kwargs: Any) -> Any:
        first = next((at for at, one in enumerate(args) if isinstance(one, torch.Tensor)), None)
        if first is None:
            return function(*args, **kwargs)
        given = [*args]
        given[first] = _as_dtensor(args[first], mesh, placements)
        return map_tensors(
            function(*given, **kwargs),
            lambda one: one.to_local() if isinstance(one, DTensor) else one,
        )

    return called


def _as_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


_MADE: dict[str, Callable[[TorchFunction, DeviceMesh, tuple[Placement, ...]], TorchFunction]] = {
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
