"""Completes the plan's sites, for what follows from the placements of parameters.

An embedding whose table is sharded by rows returns a Partial: each rank looks up its own rows, and
the others are zero. A rank without any of the units of a projection, such as heads, has empty
tensors, of which torch does not infer all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.lowering.ir import AxisMove, HookPoint, Lowered, OpKind, Schedule, Site, SiteStep
from plan_api.lowering.model_names import is_inside
from plan_api.runtime.local_shards import local_shape
from plan_api.spec.axes import axis_names
from plan_api.static.comparison import StaticError

__all__ = ["axes_of_rows", "static_sites"]


def static_sites(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> list[Site]:
    """Returns the sites of modules that run on local tensors, completed.

    Tokens are looked up among this rank's rows (`<op:embedding>`). Unless the plan says otherwise,
    an embedding's output is Partial along the axes that shard its rows, and replicated along the
    others. On a rank without units the sizes of views are inferred (`<op:view>`).

    Args:
        model: the model of the plan.
        lowered: the plan, lowered for this model.
        mesh: the plan's mesh.

    Raises:
        StaticError: the rows of a table are sharded, and the plan does not reduce the output.
    """
    names = axis_names(mesh)
    rows = {
        path: [names[axis] for axis in axes_of_rows(path, model, lowered.schedules)]
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not lowered.runs_on_dtensors(path)
    }
    found: list[Site] = []
    with_operators: set[str] = set()
    reduced: set[tuple[str, str]] = set()
    for site in lowered.sites:
        if lowered.runs_on_dtensors(site.path):
            continue
        if site.path in rows and site.hook_point is HookPoint.FORWARD:
            axes = rows[site.path]
            site = replace(site, steps=tuple(_with_src(step, axes) for step in site.steps))
            reduced.update((site.path, axis) for step in site.steps for axis in step.moves)
        if site.hook_point is HookPoint.OPERATOR:
            with_operators.add(site.path)
        found.append(site)
    for path, axes in rows.items():
        missing = [axis for axis in axes if (path, axis) not in reduced]
        if missing:
            raise StaticError(
                f"{path}.weight: its rows are sharded along {', '.join(missing)}, so its output is "
                f"Partial, and the plan does not reduce it: add "
                f"shard({path + '.<out>'!r}, Replicate(), {missing[0]!r}), or use mode='eager'",
                path,
            )
        if axes and path not in with_operators:
            moves = {axis: AxisMove(Shard(0)) for axis in axes}
            step = SiteStep("<op>", "embedding", OpKind.ANNOTATE, moves, ())
            found.append(Site(path, HookPoint.OPERATOR, (step,)))
    return _with_views(found, model, lowered, mesh)


def _with_views(
    sites: Sequence[Site], model: nn.Module, lowered: Lowered, mesh: DeviceMesh
) -> list[Site]:
    """Adds the operators that view tensors, in modules of whose units this rank has none."""
    tensors = dict(model.named_parameters())
    regions = {
        one.region
        for one in lowered.uneven_units
        for name, schedule in lowered.schedules.items()
        if name.rpartition(".")[0].rpartition(".")[0] == one.region
        and name in tensors
        and 0 in local_shape(torch.empty(tensors[name].shape, device="meta"), mesh, schedule.run)
    }
    paths = dict.fromkeys(
        path for path, _ in model.named_modules() for region in regions if is_inside(path, region)
    )
    views = tuple(SiteStep("<op>", name, OpKind.ANNOTATE, {}, ()) for name in ("view", "reshape"))
    found = []
    for site in sites:
        if site.path in paths and site.hook_point is HookPoint.OPERATOR:
            del paths[site.path]
            names = {step.index for step in site.steps}
            new = tuple(view for view in views if view.index not in names)
            site = replace(site, steps=(*site.steps, *new))
        found.append(site)
    return [*found, *(Site(path, HookPoint.OPERATOR, views) for path in paths)]


def axes_of_rows(path: str, model: nn.Module, schedules: Mapping[str, Schedule]) -> list[int]:
    """Returns the numbers of the axes that shard the rows of an embedding.

    Args:
        path: of the embedding.
        model: of the plan.
        schedules: of the plan, by parameter.
    """
    # The attribute is the local parameter, which is not among the model's.
    table = model.get_submodule(path)._parameters["weight"]
    names = [name for name, param in model.named_parameters() if param is table]
    schedule = schedules.get(names[0]) if names else None
    if schedule is None:
        return []
    return [axis for axis, one in enumerate(schedule.run) if getattr(one, "dim", None) == 0]


def _with_src(step: SiteStep, rows: Sequence[str]) -> SiteStep:
    moves = {
        axis: move
        if move.src is not None
        else replace(move, src=Partial() if axis in rows else Replicate())
        for axis, move in step.moves.items()
    }
    return replace(step, moves=moves)
