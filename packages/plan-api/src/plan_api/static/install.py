"""A model whose parameters are placed, made to run on local tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Site
from plan_api.ops.expert_indices import install_expert_indices
from plan_api.options import ParallelizeOptions
from plan_api.runtime.containers import map_tensors
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.gradients import GradientReduction
from plan_api.runtime.hooks import SiteCoverage, install_site_hook
from plan_api.static.gradients import LeafGradients
from plan_api.static.guard import Guard
from plan_api.static.leaves import Leaf, leaves_of
from plan_api.static.mover import StaticMover
from plan_api.static.on_dtensors import install_on_dtensors
from plan_api.static.operators import install_operators
from plan_api.static.optimizer import mend_steps, step_on_leaves
from plan_api.static.passed import Passed
from plan_api.static.site import mover_of
from plan_api.static.tables import with_tables

__all__ = ["StaticParts", "install_static"]


@dataclass(frozen=True)
class StaticParts:
    """What makes a model static.

    Attributes:
        handles: of its hooks.
        gradients: what reduces them.
        guard: what compares it with Eager.
        leaves: what modules find in place of parameters.
    """

    handles: tuple[RemovableHandle, ...]
    gradients: GradientReduction
    guard: Guard
    leaves: tuple[Leaf, ...]


def install_static(
    model: nn.Module,
    lowered: Lowered,
    mesh: DeviceMesh,
    coverage: SiteCoverage,
    options: ParallelizeOptions,
) -> StaticParts:
    """Makes modules find local tensors, and installs hooks that move them.

    Args:
        model: its parameters are DTensors.
        lowered: the plan, checked by `check_static`.
        mesh: the plan's.
        coverage: is told which sites are passed.
        options: of `parallelize`.
    """
    leaves = leaves_of(model, lowered.runs_on_dtensors)
    gradients = LeafGradients(
        model, leaves, _of_gradients(lowered.sites), coverage, options.fused_mb, warns=options.warns
    )
    handles: list[RemovableHandle] = []
    passed = Passed()
    for path in lowered.eager:
        handles += install_on_dtensors(model, path, lowered.sites, lowered.indices, mesh, coverage)
    for site in with_tables(model, lowered, mesh):
        module = model.get_submodule(site.path)
        if site.hook_point is HookPoint.OPERATOR:
            handles += install_operators(site, module, mesh, lowered.runs_on_dtensors)
        elif site.hook_point.is_module_hook:
            movers = [
                (step.index, mover)
                for step in site.moved
                if (mover := mover_of(site, step, mesh, passed)) is not None
            ]
            if movers:
                handles.append(install_site_hook(site, module, movers, coverage))
            else:
                coverage.record(site)
        elif site.hook_point is HookPoint.RUN:
            handles += _use_moved(site, module, mesh)
    for path, counted in lowered.indices.items():
        if not lowered.runs_on_dtensors(path):
            handles += install_expert_indices(model.get_submodule(path), counted, mesh, path)
    step_on_leaves(leaves)
    guard = Guard(model, lowered, mesh, leaves, gradients, passed, options.guard_steps)
    begin = _begin(leaves, gradients, passed)  # before the guard looks at them
    handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
    return StaticParts((*handles, *guard.handles), gradients, guard, tuple(leaves))


def _use_moved(site: Site, module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Parameters that operators take otherwise than they rest, as a Partial bias."""
    movers = [
        (step.tensor, StepContext(site.name, step).wrap(StaticMover(step, mesh, site.name)))
        for step in site.steps
        if step.kind is OpKind.REDIST
    ]
    if not movers:
        return []
    rests: list[torch.Tensor] = []

    def before(module: nn.Module, _: Any) -> None:
        rests[:] = [module.__dict__[name] for name, _ in movers]
        for name, mover in movers:
            module.__dict__[name] = mover(module.__dict__[name])

    def after(module: nn.Module, _: Any, __: Any) -> None:
        for (name, _), rest in zip(movers, rests, strict=False):
            module.__dict__[name] = rest
        rests.clear()

    return [
        module.register_forward_pre_hook(before),
        module.register_forward_hook(after, always_call=True),
    ]


def _of_gradients(sites: Iterable[Site]) -> dict[str, dict[str, Placement]]:
    """How gradients are placed where the plan says so, by parameter and axis."""
    said: dict[str, dict[str, Placement]] = {}
    for site in sites:
        for step in site.steps:
            if site.hook_point is HookPoint.GRAD and step.kind is OpKind.ANNOTATE:
                name = f"{site.path}.{step.tensor}" if site.path else step.tensor
                moves = step.moves.items()
                said.setdefault(name, {}).update({axis: move.dst for axis, move in moves})
    return said


def _begin(leaves: Sequence[Leaf], gradients: LeafGradients, passed: Passed) -> Any:
    def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mend_steps()
        passed.begin()
        gradients.clear()
        renewed = [leaf.refresh() for leaf in leaves]
        if any(renewed):
            step_on_leaves(leaves)
            gradients.renew(model)
        for given in (*args, *kwargs.values()):
            if type(given) is not torch.Tensor:
                map_tensors(given, _refuse)

    return hook


def _refuse(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise ValueError(
            f"the model is given a DTensor, {tensor._spec}: in static mode it runs on local "
            f"tensors: give it what one device would be given, or use mode='eager'"
        )
    return tensor
