"""Passes over a plan's operations: overrides, fusion into sites, and schedules of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api.lowering.ir import (
    AxisMove,
    HookPoint,
    Op,
    OpKind,
    Override,
    PhasePlacements,
    Schedule,
    Site,
    SiteStep,
)
from plan_api.spec.axes import axis_names

__all__ = ["fuse", "phase_placements", "resolve_overrides", "schedules"]

_Placements = tuple[Placement, ...]


def resolve_overrides(ops: Iterable[Op]) -> tuple[list[Op], list[Override]]:
    """Keeps the last of the operations with the same target, in the order of the first ones.

    Returns:
        the operations that apply, and the overrides; an operation that repeats another one exactly
        is no override.
    """
    applied: dict[object, Op] = {}
    overrides = []
    for op in ops:
        earlier = applied.get(op.target)
        if earlier is not None and _move(earlier) != _move(op):
            overrides.append(Override(earlier, op))
        applied[op.target] = op
    return list(applied.values()), overrides


def fuse(ops: Iterable[Op]) -> list[Site]:
    """Fuses operations on one tensor into a step, and steps at one hook point into a site.

    Operations on different tensors commute; those on one tensor are done in the order of `OpKind`,
    and along all axes at once, which has the result of doing them one after another.

    Args:
        ops: of which no two have the same target.
    """
    sites: dict[tuple[str, HookPoint], dict[tuple[str, int | str, OpKind], list[Op]]] = {}
    for op in ops:
        steps = sites.setdefault((op.path, op.hook_point), {})
        steps.setdefault((op.tensor, op.index, op.kind), []).append(op)
    return [Site(path, point, tuple(_steps(steps))) for (path, point), steps in sites.items()]


def _steps(steps: Mapping[tuple[str, int | str, OpKind], list[Op]]) -> Iterable[SiteStep]:
    order = list(OpKind)
    for tensor, index, kind in sorted(
        steps, key=lambda key: (key[0], str(key[1]), order.index(key[2]))
    ):
        ops = steps[tensor, index, kind]
        yield SiteStep(
            tensor,
            index,
            kind,
            MappingProxyType({op.axis: _move(op) for op in ops}),
            tuple(dict.fromkeys(op.entry.number for op in ops)),
            tuple(dict.fromkeys(op.entry.line for op in ops if op.entry.line)),
        )


def _move(op: Op) -> AxisMove:
    return AxisMove(op.dst, op.src, op.grad_dst, op.grad_src, op.options)


def phase_placements(ops: Iterable[Op], mesh: DeviceMesh) -> dict[str, PhasePlacements]:
    """Computes the placements of each tensor that a plan places, in every phase.

    Args:
        ops: of the plan.
        mesh: of the plan.

    Returns:
        the placements by the first name of the parameter or buffer.
    """
    placed: dict[str, dict[HookPoint, dict[int, Placement]]] = {}
    entries: dict[str, dict[int, str]] = {}
    axes = axis_names(mesh)
    for op in ops:
        if op.kind is OpKind.SHARD:
            name = f"{op.path}.{op.tensor}" if op.path else op.tensor
            phases = placed.setdefault(name, {})
            phases.setdefault(op.hook_point, {})[axes.index(op.axis)] = op.dst
            entries.setdefault(name, {})[op.entry.number] = op.entry.line
    return {
        name: _phase_placements(
            phases,
            mesh,
            tuple(entries[name]),
            tuple(dict.fromkeys(line for line in entries[name].values() if line)),
        )
        for name, phases in placed.items()
    }


def _phase_placements(
    phases: Mapping[HookPoint, Mapping[int, Placement]],
    mesh: DeviceMesh,
    entries: tuple[int, ...],
    lines: tuple[str, ...],
) -> PhasePlacements:
    def placements_in(phase: HookPoint, default: _Placements) -> _Placements:
        changed = phases.get(phase, {})
        return tuple(changed.get(axis, otherwise) for axis, otherwise in enumerate(default))

    init = placements_in(HookPoint.INIT, (Replicate(),) * mesh.ndim)
    rest, run = placements_in(HookPoint.OPTIM, init), placements_in(HookPoint.RUN, init)
    gradient = placements_in(HookPoint.GRAD, rest if HookPoint.OPTIM not in phases else run)
    return PhasePlacements(frozenset(phases), init, rest, run, gradient, entries, lines)


def schedules(phases: Mapping[str, PhasePlacements], mesh: DeviceMesh) -> dict[str, Schedule]:
    """Computes the schedule of every tensor that a plan places, by its first name.

    Args:
        phases: of the tensors, as `check_phases` accepts them.
        mesh: of the plan.
    """
    return {
        name: Schedule(
            _strided_where_inner_axes_shard(placed.run, placed.rest, mesh),
            placed.run,
            keeps_unsharded=placed.init == placed.run != placed.rest,
            reduces_at_end=placed.gradient != placed.rest,
            entries=placed.entries,
            lines=placed.lines,
        )
        for name, placed in phases.items()
    }


def _strided_where_inner_axes_shard(
    run: _Placements, rest: _Placements, mesh: DeviceMesh
) -> _Placements:
    """Makes shards at rest subdivide the shards at run time.

    DTensor shards a dim along the axes from left to right. Where an axis on the right shards the
    same dim at run time too, the subdivision is torch's _StridedShard, as FSDP2 beside tensor
    parallelism has it; unsharding then communicates along one axis only.
    """
    placements = list(rest)
    for axis, placement in enumerate(rest):
        if type(placement) is not Shard or run[axis] == placement:
            continue
        inner = [
            mesh.size(other)
            for other in range(axis + 1, mesh.ndim)
            if rest[other] == placement == run[other]
        ]
        if inner:
            placements[axis] = _StridedShard(placement.dim, split_factor=math.prod(inner))
    return tuple(placements)
