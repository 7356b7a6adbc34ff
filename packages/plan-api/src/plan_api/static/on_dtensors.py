"""Modules that stay on DTensors while the rest of their model runs on local tensors.

At their border what enters becomes DTensors, placed as the plan says, and what they return local
tensors; between them all is Eager's. Gradients cross the border the other way, as they are
everywhere in static mode: of a shard a shard, of all else the whole, unless the plan says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from plan_api.spec.axes import axis_names
from plan_api.static.compare import StaticError

__all__ = ["check_borders", "install_on_dtensors"]

_Placements: TypeAlias = tuple[Placement, ...]


def check_borders(
    paths: Iterable[str], sites: Sequence[Site], mesh: DeviceMesh
) -> Iterator[StaticError]:
    """What is wrong where modules begin that stay on DTensors.

    Args:
        paths: of these modules.
        sites: of the plan.
        mesh: the plan's.
    """
    for path in paths:
        if not path:
            whole = "the whole model is to stay on DTensors (eager('')): use mode='eager'"
            yield StaticError(whole, path)
        try:
            _entering(path, sites, mesh)
        except ValueError as error:
            yield StaticError(str(error), path)


def install_on_dtensors(
    model: nn.Module,
    path: str,
    sites: Sequence[Site],
    indices: Mapping[str, Sequence[ExpertIndices]],
    mesh: DeviceMesh,
    coverage: SiteCoverage,
) -> Iterator[RemovableHandle]:
    """Hooks of one module that stays on DTensors, and of what is in it.

    Args:
        model: its parameters there are found as DTensors.
        path: of the module.
        sites: of the plan.
        indices: arguments that count what each rank has, by the module's path.
        mesh: the plan's.
        coverage: is told which sites are passed.
    """
    module = model.get_submodule(path)
    enter = _Enter(positional_names(module), _entering(path, sites, mesh), mesh)
    yield module.register_forward_pre_hook(enter, with_kwargs=True)
    inside = [site for site in sites if is_inside(site.path, path)]
    own = {name: counted for name, counted in indices.items() if is_inside(name, path)}
    yield from install_eager(model, inside, {}, own, mesh, coverage)
    steps = _steps(path, HookPoint.FORWARD, sites)
    yield module.register_forward_hook(_Leave(path, steps, axis_names(mesh)))


class _Enter:
    """What is given to a module becomes DTensors: said by the plan, or whole."""

    def __init__(
        self,
        places: Sequence[str],
        said: Mapping[int | str, tuple[_Placements, _Placements]],
        mesh: DeviceMesh,
    ) -> None:
        self._said = [(*argument_slot(index, places), one) for index, one in said.items()]
        self._mesh = mesh

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = [*args], dict(kwargs)
        for place, name, (placements, grads) in self._said:
            if place < len(given):
                given[place] = map_tensors(given[place], self._as_dtensor(placements, grads))
            elif name in named:
                named[name] = map_tensors(named[name], self._as_dtensor(placements, grads))
        whole = self._as_dtensor(*(((Replicate(),) * self._mesh.ndim,) * 2))
        return (
            tuple(map_tensors(one, whole) for one in given),
            {name: map_tensors(one, whole) for name, one in named.items()},
        )

    def _as_dtensor(
        self, placements: _Placements, grads: _Placements
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def made(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, DTensor):
                return tensor
            return _AsDTensor.apply(tensor, self._mesh, placements, grads)  # type: ignore[no-any-return, no-untyped-call]

        return made


class _Leave:
    """What a module returns becomes local tensors."""

    def __init__(self, path: str, steps: Sequence[SiteStep], axes: Sequence[str]) -> None:
        self._path, self._axes = path, axes
        self._steps = [(step.index, step.moves) for step in steps]

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        for index, moves in self._steps:
            output = replace_part(output, index, self._as_local(moves), self._path)
        return map_tensors(output, self._as_local({}))

    def _as_local(self, moves: Mapping[str, AxisMove]) -> Callable[[torch.Tensor], torch.Tensor]:
        said = [moves[axis].grad_src if axis in moves else None for axis in self._axes]

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            grads = tuple(
                one or _of_gradient(now) for one, now in zip(said, tensor.placements, strict=True)
            )
            return _AsLocal.apply(tensor, grads)  # type: ignore[no-any-return, no-untyped-call]

        return made


class _AsDTensor(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: DeviceMesh,
        placements: _Placements,
        grads: _Placements,
    ) -> torch.Tensor:
        ctx.grads = grads
        return DTensor.from_local(local, mesh, placements, run_check=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return grads[0].redistribute(placements=ctx.grads).to_local(), None, None, None


class _AsLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grads: _Placements) -> torch.Tensor:
        ctx.grads, ctx.mesh = grads, tensor.device_mesh
        ctx.shape, ctx.stride = tensor.shape, tensor.stride()
        return tensor.to_local()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        whole = DTensor.from_local(
            grads[0], ctx.mesh, ctx.grads, run_check=False, shape=ctx.shape, stride=ctx.stride
        )
        return whole, None


def _entering(
    path: str, sites: Sequence[Site], mesh: DeviceMesh
) -> dict[int | str, tuple[_Placements, _Placements]]:
    """How arguments come, and how their gradients go back, by place or name.

    Raises:
        ValueError: the plan moves one, and does not say how it comes.
    """
    axes = axis_names(mesh)
    before: dict[int | str, list[Placement]] = {}
    grads: dict[int | str, list[Placement | None]] = {}
    told: set[tuple[int | str, str]] = set()
    for step in _steps(path, HookPoint.FORWARD_PRE, sites):
        comes = before.setdefault(step.index, [Replicate()] * mesh.ndim)
        back = grads.setdefault(step.index, [None] * mesh.ndim)
        for axis, move in step.moves.items():
            src = move.dst if step.kind is OpKind.ANNOTATE else move.src
            if src is None and (step.index, axis) in told:
                continue
            if src is None:
                raise ValueError(
                    f"{path}.<in:{step.index}> is moved, and {path} stays on DTensors in static "
                    f"mode: say what it is before, redistribute(path, src, dst)"
                )
            told.add((step.index, axis))
            comes[axes.index(axis)] = src
            back[axes.index(axis)] = move.grad_dst
    return {
        index: (
            tuple(comes),
            tuple(said or _of_gradient(now) for said, now in zip(grads[index], comes, strict=True)),
        )
        for index, comes in before.items()
    }


def _of_gradient(placement: Placement) -> Placement:
    return placement if isinstance(placement, Shard) else Replicate()


def _steps(path: str, moment: HookPoint, sites: Iterable[Site]) -> list[SiteStep]:
    return [
        step
        for site in sites
        if site.path == path and site.hook_point is moment
        for step in site.moved
    ]
