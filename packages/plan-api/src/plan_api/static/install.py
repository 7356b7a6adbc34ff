"""A model whose parameters are placed, made to run on local tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from plan_api.axes import axis_names
from plan_api.containers import map_tensors
from plan_api.fuse import Site, Step
from plan_api.gradients import Gradients
from plan_api.hooks import Fired, Moves, install
from plan_api.indices import Counting, Indices
from plan_api.ir import Act, Moment
from plan_api.schedule import Schedule
from plan_api.static.gradients import LeafGradients
from plan_api.static.guard import Guard
from plan_api.static.leaves import Leaf, leaves_of
from plan_api.static.mover import StaticMover
from plan_api.static.operators import check_operators, install_operators
from plan_api.static.optimizer import mend_steps, step_on_leaves
from plan_api.static.tables import with_tables

__all__ = ["StaticParts", "check_static", "install_static"]


@dataclass(frozen=True)
class StaticParts:
    """What makes a model static.

    Attributes:
        handles: of its hooks.
        gradients: what reduces them.
        guard: what compares it with Eager.
    """

    handles: tuple[RemovableHandle, ...]
    gradients: Gradients
    guard: Guard


def check_static(
    model: nn.Module,
    sites: Iterable[Site],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> None:
    """Refuses what static mode cannot do, before anything is changed or sent.

    Raises:
        ValueError: a site does not say what a tensor is before, or names a function that there is
            not; a parameter has phases; what a module makes is to be cut; or the rows of an
            embedding are, and nothing is said of the sum. All of them are named.
    """
    problems = []
    try:
        sites = with_tables(sites, model, schedules, mesh)
    except ValueError as error:
        problems.append(str(error))
    for site in sites:
        if site.moment is Moment.OPERATOR:
            try:
                check_operators(site)
            except ValueError as error:
                problems.append(str(error))
        for step in site.steps:
            try:
                if site.moment.of_activations and step in site.moved:
                    _mover(site, step, mesh)
            except ValueError as error:
                problems.append(str(error))
            made = [move.dst for move in step.moves.values() if step.act is Act.FACTORY]
            if any(placement != Replicate() for placement in made):
                problems.append(
                    f"{site.name}: what it makes is to be {made}: in static mode it is what this "
                    f"rank's code asks for; use mode='eager'"
                )
    problems += [
        f"{name} rests otherwise than it runs: static mode knows no phases; use mode='eager'"
        for name, schedule in schedules.items()
        if schedule.moves
    ]
    if problems:
        raise ValueError("the plan does not fit static mode:\n" + "\n".join(problems))


def install_static(
    model: nn.Module,
    sites: Sequence[Site],
    schedules: Mapping[str, Schedule],
    indices: Mapping[str, Sequence[Indices]],
    mesh: DeviceMesh,
    fired: Fired,
    bucket_mb: float,
    guard_steps: int,
) -> StaticParts:
    """Makes modules find local tensors, and installs hooks that move them.

    Args:
        model: its parameters are DTensors.
        sites: checked by `check_static`.
        schedules: of its parameters.
        indices: arguments that count what each rank has, by the module's path.
        mesh: the plan's.
        fired: is told which are passed.
        bucket_mb: as `parallelize` has it.
        guard_steps: as `parallelize` has it.
    """
    placed = with_tables(sites, model, schedules, mesh)
    leaves = leaves_of(model)
    gradients = LeafGradients(model, leaves, _of_gradients(sites), fired, bucket_mb)
    handles: list[RemovableHandle] = []
    for site in placed:
        module = model.get_submodule(site.path)
        if site.moment is Moment.OPERATOR:
            handles += install_operators(site, module, mesh)
        elif site.moment.of_activations:
            movers = [
                (step.index, mover)
                for step in site.moved
                if (mover := _mover(site, step, mesh)) is not None
            ]
            if movers:
                handles.append(install(site, module, movers, fired))
            else:
                fired.pass_(site)
        elif site.moment is Moment.RUN:
            handles += _use_moved(site, module, mesh)
    for path, counted in indices.items():
        module, counting = model.get_submodule(path), Counting(counted)
        handles += [
            module.register_forward_pre_hook(counting.enter, with_kwargs=True),
            module.register_forward_hook(counting.leave, always_call=True),
        ]
    step_on_leaves(leaves)
    guard = Guard(model, sites, indices, mesh, leaves, gradients, guard_steps)
    begin = _begin(leaves, gradients)  # before the guard looks at them
    handles.append(model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
    return StaticParts((*handles, guard.handle), gradients, guard)


def _mover(site: Site, step: Step, mesh: DeviceMesh) -> Moves | None:
    """What moves a tensor of a step; None if there is nothing to do."""
    at_root = not site.path
    if step.act is Act.ANNOTATE:  # inside of the model nobody has to know
        return _Shown(step, mesh) if at_root and site.moment is Moment.FORWARD else None
    whole = at_root and site.moment is Moment.FORWARD_PRE
    mover = StaticMover(step, mesh, site.name, whole)
    return None if mover.idle else mover


class _Shown:
    """What the model returns, annotated: the script is given the DTensor that Eager would give."""

    settled: DTensorSpec | None = None

    def __init__(self, step: Step, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._placements: list[Placement] = [
            step.moves[axis].dst if axis in step.moves else Replicate() for axis in axis_names(mesh)
        ]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(tensor, self._mesh, self._placements, run_check=False)


def _use_moved(site: Site, module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
    """Parameters that operators take otherwise than they rest, as a Partial bias."""
    movers = [
        (step.tensor, StaticMover(step, mesh, site.name))
        for step in site.steps
        if step.act is Act.REDIST
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
            if site.moment is Moment.GRAD and step.act is Act.ANNOTATE:
                name = f"{site.path}.{step.tensor}" if site.path else step.tensor
                moves = step.moves.items()
                said.setdefault(name, {}).update({axis: move.dst for axis, move in moves})
    return said


def _begin(leaves: Sequence[Leaf], gradients: LeafGradients) -> Any:
    def hook(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mend_steps()
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
