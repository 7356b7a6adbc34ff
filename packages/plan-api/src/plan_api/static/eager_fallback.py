"""Eager fallbacks: modules that run on DTensors while the rest of the model runs on local tensors.

At the boundary of such a module inputs become DTensors, placed as the plan says, and outputs become
local tensors; in between everything is Eager's. Gradients cross the boundary in the other
direction, placed as everywhere in static mode: the gradient of a Shard is the same Shard, any other
is replicated, unless the plan says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.eager import install_eager
from plan_api.lowering.ir import AxisMove, ExpertIndices, HookPoint, OpKind, Site, SiteStep
from plan_api.lowering.model_names import argument_slot, is_inside, positional_names
from plan_api.runtime.containers import map_tensors, replace_part
from plan_api.runtime.hooks import SiteCoverage
from plan_api.runtime.local_shards import ShardSizes
from plan_api.spec.axes import axis_names
from plan_api.spec.path import generalize_numbers
from plan_api.static.comparison import StaticError

__all__ = [
    "check_boundaries", "install_eager_fallback", "smallest_fallback", "widen_fallbacks",
]  # fmt: skip

_Placements: TypeAlias = tuple[Placement, ...]
_Convert: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _InputPlacements:
    """Placements of an input of a fallback, and of its gradient."""

    forward: _Placements
    backward: _Placements


def check_boundaries(
    paths: Iterable[str], sites: Sequence[Site], mesh: DeviceMesh
) -> Iterator[StaticError]:
    """Checks that the plan says how the inputs of eager fallbacks are placed.

    Args:
        paths: of the modules that fall back.
        sites: the sites of the plan.
        mesh: the plan's mesh.

    Yields:
        an error for each module where it does not.
    """
    for path in paths:
        if not path:
            message = "eager('') keeps the whole model on DTensors: use mode='eager'"
            yield StaticError(message, path)
        try:
            _input_placements(path, sites, mesh)
        except ValueError as error:
            yield StaticError(str(error), path)


def install_eager_fallback(
    model: nn.Module,
    path: str,
    sites: Sequence[Site],
    indices: Mapping[str, Sequence[ExpertIndices]],
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    sizes: ShardSizes,
) -> Iterator[RemovableHandle]:
    """Installs the hooks of one eager fallback, and of the modules inside of it.

    Args:
        model: the model; modules find DTensor parameters there.
        path: of the module.
        sites: the sites of the plan.
        indices: arguments that are expert indices, by the module's path.
        mesh: the plan's mesh.
        coverage: records the sites that are passed.
        sizes: knows the global sizes of uneven shards.
    """
    module = model.get_submodule(path)
    placements = _input_placements(path, sites, mesh)
    enter = _InputsToDTensors(path, positional_names(module), placements, mesh, sizes)
    yield module.register_forward_pre_hook(enter, with_kwargs=True)
    inside = [site for site in sites if is_inside(site.path, path)]
    own_indices = {name: index for name, index in indices.items() if is_inside(name, path)}
    yield from install_eager(model, inside, {}, own_indices, mesh, coverage)
    steps = _steps_at(path, HookPoint.FORWARD, sites)
    yield module.register_forward_hook(_OutputsToLocal(path, steps, axis_names(mesh)))


def smallest_fallback(site: str, model: nn.Module, fallbacks: Collection[str]) -> str | None:
    """Returns the innermost modules around a site that do not fall back yet.

    Args:
        site: the module or parameter where static mode fails.
        model: the model.
        fallbacks: patterns of modules that fall back.

    Returns:
        a pattern of module paths; None if only the model itself is left.
    """
    modules = dict(model.named_modules())
    parts = site.split(".")
    for count in range(len(parts), 0, -1):
        path = ".".join(parts[:count])
        if path not in modules or not _has_forward(modules[path]):
            continue
        if not any(re.match(rf"{fallback}(?:\.|$)", path) for fallback in fallbacks):
            return generalize_numbers(path)
    return None


def widen_fallbacks(fallbacks: Mapping[str, str], wider: str, reason: str) -> dict[str, str]:
    """Adds a pattern of modules to the fallbacks, in place of those inside of it.

    Args:
        fallbacks: the reason by pattern.
        wider: the pattern to add.
        reason: why, unless a pattern inside of it already has a reason.
    """
    inside = [fallback for fallback in fallbacks if fallback.startswith(rf"{wider}\.")]
    others = {one: known for one, known in fallbacks.items() if one not in inside}
    return others | {wider: fallbacks[inside[0]] if inside else reason}


def _has_forward(module: nn.Module) -> bool:
    """Whether it can be called, which an `nn.ModuleList` cannot."""
    return type(module).forward is not nn.Module.forward


class _InputsToDTensors:
    """Makes the inputs of a module DTensors: placed as the plan says, others replicated."""

    def __init__(
        self, path: str, places: Sequence[str],
        placements: Mapping[int | str, _InputPlacements], mesh: DeviceMesh, sizes: ShardSizes,
    ) -> None:  # fmt: skip
        self._placed = [
            (*argument_slot(index, places), placement) for index, placement in placements.items()
        ]
        self._mesh, self._sizes, self._what = mesh, sizes, f"{path}.<in>"

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        by_place, by_name = [*args], dict(kwargs)
        for place, name, placements in self._placed:
            if place < len(by_place):
                by_place[place] = map_tensors(by_place[place], self._as_dtensor(placements))
            elif name in by_name:
                by_name[name] = map_tensors(by_name[name], self._as_dtensor(placements))
        replicate = (Replicate(),) * self._mesh.ndim
        convert = self._as_dtensor(_InputPlacements(replicate, replicate))
        return (
            tuple(map_tensors(one, convert) for one in by_place),
            {name: map_tensors(one, convert) for name, one in by_name.items()},
        )

    def _as_dtensor(self, placements: _InputPlacements) -> _Convert:
        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return tensor
            return _AsDTensor.apply(  # type: ignore[no-any-return, no-untyped-call]
                tensor, self._sizes, self._what, placements
            )

        return convert


class _OutputsToLocal:
    """Makes the outputs of a module local tensors."""

    def __init__(self, path: str, steps: Sequence[SiteStep], axes: Sequence[str]) -> None:
        self._path, self._axes = path, axes
        self._moves = [(step.index, step.moves) for step in steps]

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        for index, moves in self._moves:
            output = replace_part(output, index, self._as_local(moves), self._path)
        return map_tensors(output, self._as_local({}))

    def _as_local(self, moves: Mapping[str, AxisMove]) -> _Convert:
        of_plan = [moves[axis].grad_src if axis in moves else None for axis in self._axes]

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            grads = tuple(
                one or _gradient_placement(forward)
                for one, forward in zip(of_plan, tensor.placements, strict=True)
            )
            return _AsLocal.apply(tensor, grads)  # type: ignore[no-any-return, no-untyped-call]

        return convert


class _AsDTensor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, sizes: ShardSizes, what: str, placements: _InputPlacements
    ) -> torch.Tensor:
        ctx.grad_placements = placements.backward
        return sizes.as_dtensor(what, local, placements.forward)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad = grads[0].redistribute(placements=ctx.grad_placements)
        return grad.to_local(), None, None, None


class _AsLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_placements: _Placements) -> torch.Tensor:
        ctx.grad_placements, ctx.mesh = grad_placements, tensor.device_mesh
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        return tensor.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        grad = DTensor.from_local(
            grads[0], ctx.mesh, ctx.grad_placements, run_check=False, shape=ctx.shape,
            stride=ctx.stride,
        )  # fmt: skip
        return grad, None


def _input_placements(
    path: str, sites: Sequence[Site], mesh: DeviceMesh
) -> dict[int | str, _InputPlacements]:
    """Returns the placements of a module's inputs and of their gradients, by place or name.

    Raises:
        ValueError: the plan redistributes an input, and does not say its current placement.
    """
    axes = axis_names(mesh)
    forward: dict[int | str, list[Placement]] = {}
    backward: dict[int | str, list[Placement | None]] = {}
    known: set[tuple[int | str, str]] = set()
    for step in _steps_at(path, HookPoint.FORWARD_PRE, sites):
        placements = forward.setdefault(step.index, [Replicate()] * mesh.ndim)
        grad_placements = backward.setdefault(step.index, [None] * mesh.ndim)
        for axis, move in step.moves.items():
            src = move.dst if step.kind is OpKind.ANNOTATE else move.src
            if src is None and (step.index, axis) in known:
                continue
            if src is None:
                raise ValueError(
                    f"{path}.<in:{step.index}>: expected its current placement, as {path} runs on "
                    f"DTensors in static mode; add redistribute(path, src, dst)"
                )
            known.add((step.index, axis))
            placements[axes.index(axis)] = src
            grad_placements[axes.index(axis)] = move.grad_dst
    return {
        index: _InputPlacements(
            tuple(placements),
            tuple(
                of_plan or _gradient_placement(placement)
                for of_plan, placement in zip(backward[index], placements, strict=True)
            ),
        )
        for index, placements in forward.items()
    }


def _gradient_placement(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else Replicate()


def _steps_at(path: str, hook_point: HookPoint, sites: Iterable[Site]) -> list[SiteStep]:
    return [
        step
        for site in sites
        if site.path == path and site.hook_point is hook_point
        for step in site.moved
    ]
