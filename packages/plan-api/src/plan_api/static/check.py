"""What static mode cannot do, refused before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from plan_api.context.check import sequences_of
from plan_api.fuse import Site
from plan_api.ir import Act, Moment
from plan_api.lowered import Lowered
from plan_api.resolve import state_of
from plan_api.static.compare import StaticError
from plan_api.static.mover import StaticMover
from plan_api.static.on_dtensors import check_borders
from plan_api.static.operators import check_operators
from plan_api.static.site import mover_of
from plan_api.static.tables import with_tables

__all__ = ["check_static"]


def check_static(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> None:
    """Refuses what static mode cannot do.

    Args:
        model: of the plan.
        lowered: the plan, for this model.
        mesh: the plan's.

    Raises:
        StaticError: a site does not say what a tensor is before, or names a function that there is
            not; a parameter has phases, or is of a module that stays on DTensors and of another
            one; what a module makes is to be cut; or the rows of an embedding are, and nothing is
            said of the sum. All of them are named.
    """
    problems = [
        *check_borders(lowered.eager, lowered.sites, mesh),
        *_tied_across(model, lowered.stays),
    ]
    try:
        sites = with_tables(model, lowered, mesh)
    except StaticError as error:
        problems.append(error)
        sites = []
    for site in sites:
        problems += (StaticError(one, site.path) for one in _of_site(site, mesh))
    problems += [
        StaticError(
            f"{name} rests otherwise than it runs: static mode knows no phases; use mode='eager'",
            name,
        )
        for name, schedule in lowered.schedules.items()
        if schedule.moves
    ]
    if problems:
        told = "\n".join(map(str, problems))
        raise StaticError(f"the plan does not fit static mode:\n{told}", problems[0].site)


def _of_site(site: Site, mesh: DeviceMesh) -> Iterator[str]:
    yield from sequences_of(site)
    if site.moment is Moment.OPERATOR:
        try:
            check_operators(site)
        except ValueError as error:
            yield str(error)
    for step in site.steps:
        if step.act is Act.ORDER:
            continue
        try:
            if site.moment.of_activations and step in site.moved:
                mover_of(site, step, mesh)
            elif site.moment is Moment.RUN and step.act is Act.REDIST:
                StaticMover(step, mesh, site.name)
        except ValueError as error:
            yield str(error)
        made = [move.dst for move in step.moves.values() if step.act is Act.FACTORY]
        if any(placement != Replicate() for placement in made):
            yield (
                f"{site.name}: what it makes is to be {made}: in static mode it is what this "
                f"rank's code asks for; use mode='eager'"
            )


def _tied_across(model: nn.Module, stays: Callable[[str], bool]) -> Iterator[StaticError]:
    """Parameters that some modules find as DTensors, and others as local tensors."""
    names: dict[int, list[str]] = {}
    for name, tensor in state_of(model):
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
