"""What static mode cannot do, refused before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from plan_api.lowering.ir import HookPoint, Lowered, OpKind, Site
from plan_api.lowering.model_names import named_state
from plan_api.static.compare import StaticError
from plan_api.static.mover import StaticMover
from plan_api.static.on_dtensors import check_borders
from plan_api.static.operators import check_operators
from plan_api.static.site import mover_of
from plan_api.static.tables import with_tables

__all__ = ["check_static", "unsupported"]


def check_static(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> None:
    """Refuses what static mode cannot do.

    Args:
        model: of the plan.
        lowered: the plan, for this model.
        mesh: the plan's.

    Raises:
        StaticError: the plan has options that static mode does not support (`unsupported`); a site
            does not say what a tensor is before, or names a function that there is not; a parameter
            is of a module that stays on DTensors and of another one; or the rows of an embedding
            are cut, and nothing is said of the sum. All of them are named.
    """
    problems = [
        *unsupported(lowered),
        *check_borders(lowered.eager, lowered.sites, mesh),
        *_tied_across(model, lowered.runs_on_dtensors),
    ]
    try:
        sites = with_tables(model, lowered, mesh)
    except StaticError as error:
        problems.append(error)
        sites = []
    for site in sites:
        problems += (StaticError(one, site.path) for one in _of_site(site, mesh))
    if problems:
        told = "\n".join(map(str, problems))
        raise StaticError(f"the plan does not fit static mode:\n{told}", problems[0].site)


def unsupported(lowered: Lowered) -> Iterator[StaticError]:
    """The options of a plan that have no effect in static mode, whatever else the plan says.

    Args:
        lowered: the plan, for a model.

    Yields:
        an error for each entry that applies fully_shard, parameter with phases, context parallel
        site, and module that shards what it makes; each names the entry's line and the remedy.
    """
    entries = {id(entry): (path, entry) for path, entry in lowered.fully_sharded.items()}
    for path, entry in entries.values():
        yield StaticError(
            f"{entry.description}: expected mode='eager' for fully_shard, got mode='static', which "
            f"would leave its parameters replicated; use mode='eager', or leave fully_shard out",
            path,
        )
    for name, schedule in lowered.schedules.items():
        if schedule.has_phases:
            lines = ", ".join(dict.fromkeys(_lines_of(lowered, schedule.entries)))
            yield StaticError(
                f"{lines}{': ' if lines else ''}{name} rests otherwise than it runs: static mode "
                f"has no phases; use mode='eager'",
                name,
            )
    for site in lowered.sites:
        for step in site.steps:
            if step.kind is OpKind.FACTORY and any(
                m.dst != Replicate() for m in step.moves.values()
            ):
                made = [move.dst for move in step.moves.values()]
                yield StaticError(
                    f"{site.name}: what it makes is to be {made}: in static mode it is what this "
                    f"rank's code asks for; use mode='eager'",
                    site.path,
                )
        yield from (StaticError(one, site.path) for one in _context_problems(site))


def _context_problems(site: Site) -> Iterator[str]:
    """Yields why static mode cannot do a site of context parallelism."""
    for step in site.steps:
        if step.kind in (OpKind.CONTEXT, OpKind.ORDER):
            yield (
                f"{site.name}:{step.tensor}:{step.index}: context parallelism takes the global "
                f"sequence length from DTensors, which static mode does not have; use mode='eager'"
            )


def _lines_of(lowered: Lowered, entries: Collection[int]) -> Iterator[str]:
    yield from (op.entry.line for op in lowered.ops if op.entry.number in entries and op.entry.line)


def _of_site(site: Site, mesh: DeviceMesh) -> Iterator[str]:
    if site.hook_point is HookPoint.OPERATOR:
        try:
            check_operators(site)
        except ValueError as error:
            yield str(error)
    for step in site.steps:
        if step.kind is OpKind.ORDER:
            continue
        try:
            if site.hook_point.is_module_hook and step in site.moved:
                mover_of(site, step, mesh)
            elif site.hook_point is HookPoint.RUN and step.kind is OpKind.REDIST:
                StaticMover(step, mesh, site.name)
        except ValueError as error:
            yield str(error)


def _tied_across(model: nn.Module, stays: Callable[[str], bool]) -> Iterator[StaticError]:
    """Parameters that some modules find as DTensors, and others as local tensors."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_state(model):
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        inside = [name for name in tied if stays(name)]
        if inside and len(inside) < len(tied):
            outside = next(name for name in tied if name not in inside)
            yield StaticError(
                f"{inside[0]} stays on a DTensor, and is tied to {outside}, which does not: let "
                f"both modules stay, eager(...)",
                outside,
            )
