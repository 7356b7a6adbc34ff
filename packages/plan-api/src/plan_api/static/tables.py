"""Embeddings in static mode: where the rows of a table are cut, what it gives is a sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.lowering.ir import AxisMove, HookPoint, Lowered, OpKind, Schedule, Site, SiteStep
from plan_api.spec.axes import axis_names
from plan_api.static.compare import StaticError

__all__ = ["with_tables"]


def with_tables(model: nn.Module, lowered: Lowered, mesh: DeviceMesh) -> list[Site]:
    """The sites of what runs on local tensors, with what embeddings tell by themselves.

    Tokens are looked up among this rank's rows (`<op:embedding>`), and what an embedding returns is
    a sum along the axes that cut its rows, and whole along the others, if nothing else is said.

    Args:
        model: of the plan.
        lowered: the plan, for this model.
        mesh: the plan's.

    Raises:
        StaticError: the rows of a table are cut, and the plan does not say what becomes of the sum.
    """
    own = {
        path: _axes_of_rows(path, model, lowered.schedules, mesh)
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not lowered.runs_on_dtensors(path)
    }
    found: list[Site] = []
    caught: set[str] = set()
    moved: set[tuple[str, str]] = set()
    for site in lowered.sites:
        if lowered.runs_on_dtensors(site.path):
            continue
        if site.path in own and site.hook_point is HookPoint.FORWARD:
            site = replace(site, steps=tuple(_told(step, own[site.path]) for step in site.steps))
            moved.update((site.path, axis) for step in site.steps for axis in step.moves)
        if site.hook_point is HookPoint.OPERATOR:
            caught.add(site.path)
        found.append(site)
    for path, axes in own.items():
        left = [axis for axis in axes if (path, axis) not in moved]
        if left:
            raise StaticError(
                f"{path}.weight: its rows are cut along {', '.join(left)}, so what it gives is a "
                f"sum: say shard({path + '.<out>'!r}, Replicate(), {left[0]!r}), or use "
                f"mode='eager'",
                path,
            )
        if axes and path not in caught:
            moves = {axis: AxisMove(Shard(0)) for axis in axes}
            step = SiteStep("<op>", "embedding", OpKind.ANNOTATE, moves, ())
            found.append(Site(path, HookPoint.OPERATOR, (step,)))
    return found


def _axes_of_rows(
    path: str, model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> Sequence[str]:
    table = model.get_submodule(path).weight
    names = [name for name, param in model.named_parameters() if param is table]
    schedule = schedules.get(names[0]) if names else None
    if schedule is None:
        return []
    axes = axis_names(mesh)
    return [axes[at] for at, one in enumerate(schedule.run) if getattr(one, "dim", None) == 0]


def _told(step: SiteStep, summed: Sequence[str]) -> SiteStep:
    moves = {
        axis: move
        if move.src is not None
        else replace(move, src=Partial() if axis in summed else Replicate())
        for axis, move in step.moves.items()
    }
    return replace(step, moves=moves)
