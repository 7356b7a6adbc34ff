"""Validates a plan for static mode, before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.fully_shard import entry_for, is_sharded_by_plan
from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Site
from plan_api.lowering.model_names import named_state
from plan_api.static.comparison import StaticError
from plan_api.static.eager_fallback import check_boundaries
from plan_api.static.operators import check_factory, check_operators
from plan_api.static.redistribute import StaticRedistribution, static_transform
from plan_api.static.sites import static_sites

__all__ = ["context_parallel_sites", "unsupported_options", "validate_static"]


def validate_static(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> None:
    """Rejects a plan that static mode does not support, or that says too little for it.

    Args:
        model: the model of the plan.
        lowered: the plan, lowered for this model.
        mesh: the plan's mesh.

    Raises:
        StaticError: the plan has options that static mode does not support
            (`unsupported_options`); a site does not say the current placement of a tensor, or
            names a function that torch does not have; a parameter is tied between a module that
            runs on DTensors (`Plan.eager`) and one that does not; or the rows of an embedding are
            sharded and its output is not reduced. The message lists all of them.
    """
    problems = [
        *unsupported_options(lowered, mesh),
        *check_boundaries(lowered.eager, lowered.sites, mesh),
        *_tied_across_fallbacks(model, lowered.runs_on_dtensors),
    ]
    try:
        sites = static_sites(model, lowered, mesh)
    except StaticError as error:
        problems.append(error)
        sites = []
    for site in sites:
        problems += (
            StaticError(site_problem, site.path) for site_problem in _site_problems(site, mesh)
        )
    if problems:
        lines = "\n".join(map(str, problems))
        raise StaticError(f"the plan does not fit static mode:\n{lines}", problems[0].site)


def unsupported_options(lowered: Lowered, mesh: DeviceMesh) -> Iterator[StaticError]:
    """Finds the options of a plan that have no effect in static mode, whatever else it says.

    Args:
        lowered: the plan, lowered for a model.
        mesh: the plan's mesh.

    Yields:
        an error for each parameter with phases that fully_shard manages; it names the entry's line
        and the remedy.
    """
    for name, schedule in lowered.schedules.items():
        entry = entry_for(name, lowered.fully_sharded)
        if (
            schedule.has_phases
            and entry is not None
            and not is_sharded_by_plan(name, entry, lowered.schedules, mesh)
        ):
            lines = ", ".join(dict.fromkeys(_lines_of(lowered, schedule.entries)))
            yield StaticError(
                f"{lines}{': ' if lines else ''}{name}: expected the same placements in every "
                f"phase, as in static mode {entry} unshards it; leave one of them out, or use "
                f"mode='eager'",
                name,
            )


def context_parallel_sites(lowered: Lowered) -> Iterator[str]:
    """Yields the names of steps of context parallelism.

    `typecheck`, and `generate_static` on FakeTensors, do not support it: attention sends keys and
    values of real tensors.
    """
    for site in lowered.sites:
        for step in site.steps:
            if step.kind in (OpKind.CONTEXT, OpKind.ORDER):
                yield f"{site.name}:{step.tensor}:{step.index}"


def _lines_of(lowered: Lowered, entries: Collection[int]) -> Iterator[str]:
    yield from (op.entry.line for op in lowered.ops if op.entry.number in entries and op.entry.line)


def _site_problems(site: Site, mesh: DeviceMesh) -> Iterator[str]:
    if site.hook_point is HookPoint.OPERATOR:
        try:
            check_operators(site)
        except ValueError as error:
            yield str(error)
    for step in site.steps:
        try:
            if site.hook_point.is_module_hook and step in site.moved:
                static_transform(site, step, mesh)
            elif step.kind is OpKind.FACTORY:
                check_factory(site, step)
            elif site.hook_point is HookPoint.RUN and step.kind is OpKind.REDIST:
                StaticRedistribution(step, mesh, site.name)
        except ValueError as error:
            yield str(error)


def _tied_across_fallbacks(model: nn.Module, stays: Callable[[str], bool]) -> Iterator[StaticError]:
    """Finds parameters that are DTensors to some modules, and local tensors to others."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_state(model):
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        inside = [name for name in tied if stays(name)]
        if inside and len(inside) < len(tied):
            outside = next(name for name in tied if name not in inside)
            yield StaticError(
                f"{inside[0]} is a DTensor by eager(...), and is tied to {outside}, which is not: "
                f"add eager(...) for both modules",
                outside,
            )
