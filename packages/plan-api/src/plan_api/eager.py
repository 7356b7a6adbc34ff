"""Hooks of a model whose operators run on DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from plan_api.context_parallel.attend import install_context
from plan_api.context_parallel.sequence import Reorder, install_shifts
from plan_api.lowering.fuse import Site, Step
from plan_api.lowering.ir import Act
from plan_api.lowering.schedule import Schedule
from plan_api.ops.expert_indices import Indices
from plan_api.ops.local_region import install_regions
from plan_api.runtime.hooks import Fired, Moves, install
from plan_api.runtime.redistribute import Mover
from plan_api.runtime.state import use_copies

__all__ = ["install_eager"]


def install_eager(
    model: nn.Module,
    sites: Iterable[Site],
    schedules: Mapping[str, Schedule],
    indices: Mapping[str, Sequence[Indices]],
    mesh: DeviceMesh,
    fired: Fired,
    mover: Callable[[Step, DeviceMesh, str], Mover] = Mover,
) -> Iterator[RemovableHandle]:
    """Installs hooks that move DTensors.

    Args:
        model: its parameters and buffers are DTensors.
        sites: of the plan.
        schedules: of parameters and buffers, by their first name.
        indices: arguments that count what each rank has, by the module's path.
        mesh: the plan's.
        fired: is told which sites are passed.
        mover: makes what moves a tensor, as `Mover` does.
    """
    hooks = [site for site in sites if site.moment.of_activations]
    for site in hooks:
        movers: list[tuple[int | str, Moves]] = [
            (
                step.index,
                Reorder(step, mesh, site)
                if step.act is Act.ORDER
                else mover(step, mesh, site.name),
            )
            for step in site.moved
        ]
        yield install(site, model.get_submodule(site.path), movers, fired)
    yield from use_copies(model, schedules)
    yield from install_regions(model, hooks, mesh, indices)
    yield from install_context(model, hooks, mesh)
    yield from install_shifts(model, hooks)
