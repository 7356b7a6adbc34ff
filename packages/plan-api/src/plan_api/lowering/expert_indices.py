"""Finds the expert numbers of each rank, for arguments that index into sharded parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from plan_api.lowering.ir import (
    EntryRef,
    ExpertIndices,
    Op,
    OpKind,
    Schedule,
    SiteStep,
    TokenDispatch,
)
from plan_api.lowering.model_names import (
    argument_slot,
    named_state,
    positional_names,
    resolve_argument,
)
from plan_api.lowering.passes import fuse
from plan_api.spec.axes import axis_names

__all__ = ["expert_indices"]


def expert_indices(
    ops: Iterable[Op], model: nn.Module, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> dict[str, list[ExpertIndices]]:
    """Finds the arguments that index into sharded parameters, by the path of their module.

    Args:
        ops: of a plan, as `check_expert_modules` accepts them.
        model: any; it is not changed.
        schedules: of its parameters, by their first names.
        mesh: of the plan.

    Raises:
        ValueError: the parameters are not sharded as the entry says, a rank has no expert, or the
            module has no such attribute; names the entry.
    """
    indexing = [op for op in ops if op.kind in (OpKind.INDEX, OpKind.DISPATCH)]
    entries = {op.entry.number: op.entry for op in indexing}
    found: dict[str, list[ExpertIndices]] = {}
    for site in fuse(indexing):
        for step in site.steps:
            entry = entries[step.entries[-1]]
            others = found.setdefault(site.path, [])
            one = _indices_of(site.path, step, entry, model, schedules, mesh)
            if others and (one.dispatch or others[0].dispatch):
                raise ValueError(
                    f"{entry.description}: expected one argument of {site.path} that indexes into "
                    f"sharded parameters, got another one; tokens are dispatched by one"
                )
            others.append(one)
    return found


def _indices_of(
    path: str,
    step: SiteStep,
    entry: EntryRef,
    model: nn.Module,
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> ExpertIndices:
    module = model.get_submodule(path)
    axes = tuple(sorted(axis_names(mesh).index(axis) for axis in step.moves))
    number = _number_of_experts(path, step, axes, entry, model, schedules)
    of_ranks = _experts_of_ranks(number, mesh, axes)
    if not of_ranks[-1]:
        raise ValueError(
            f"{entry.description}: expected at least one of {number} on each rank, got none on "
            f"the last of {len(of_ranks)} ranks, as torch.chunk splits them; shard them on fewer "
            f"ranks"
        )
    own = _experts_of(number, mesh, axes, mesh.get_coordinate() or [0] * mesh.ndim)
    positional = positional_names(module)
    dispatch = None
    if step.kind is OpKind.DISPATCH:
        dispatch = _dispatch(path, module, of_ranks, step, entry)
    return ExpertIndices(
        argument_slot(step.index, positional),
        own,
        axes,
        _attributes(entry, module, number, len(own)),
        step,
        dispatch,
    )


def _dispatch(
    path: str, module: nn.Module, experts: tuple[range, ...], step: SiteStep, entry: EntryRef
) -> TokenDispatch:
    options, positional = dict(entry.options), positional_names(module)

    def slot(name: int | str) -> tuple[int, str]:
        return argument_slot(resolve_argument(entry.description, path, module, name), positional)

    weights = options["weights"]
    return TokenDispatch(
        slot(options["tokens"]), None if weights is None else slot(weights), experts, step
    )


def _experts_of_ranks(number: int, mesh: DeviceMesh, axes: Sequence[int]) -> tuple[range, ...]:
    """The expert numbers of all ranks along some axes, the first axis outermost."""
    coordinates = [0] * mesh.ndim
    found = []
    for along in itertools.product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, coordinate in zip(axes, along, strict=True):
            coordinates[axis] = coordinate
        found.append(_experts_of(number, mesh, axes, coordinates))
    return tuple(found)


def _experts_of(
    number: int, mesh: DeviceMesh, axes: Iterable[int], coordinates: Sequence[int]
) -> range:
    """The expert numbers of one rank, as DTensor's `Shard` splits them along one axis at a time."""
    own = range(number)
    for axis in axes:
        size, at = -(-len(own) // mesh.size(axis)), coordinates[axis]
        own = own[size * at : size * (at + 1)]
    return own


def _number_of_experts(
    path: str,
    step: SiteStep,
    axes: tuple[int, ...],
    entry: EntryRef,
    model: nn.Module,
    schedules: Mapping[str, Schedule],
) -> int:
    """The size of the sharded dim, which the module's sharded parameters must have in common."""
    dim = getattr(next(iter(step.moves.values())).dst, "dim", 0)
    first_names = {id(tensor): name for name, tensor in reversed([*named_state(model)])}
    sharded: dict[str, int] = {}
    others: dict[str, int] = {}
    for param in model.get_submodule(path).parameters():
        name = first_names[id(param)]
        schedule = schedules.get(name)
        rest = schedule.rest if schedule is not None else ()
        along = tuple(axis for axis, one in enumerate(rest) if getattr(one, "dim", None) == dim)
        if along == axes and all(rest[axis] == Shard(dim) for axis in axes):
            sharded[name] = param.shape[dim]
        elif along or param.ndim > dim:
            others[name] = param.shape[dim]
    for name, size in others.items():
        if size in sharded.values():
            raise ValueError(
                f"{entry.description}: dim {dim} of {name} has size {size} too, and is not sharded "
                f"like that of {', '.join(sharded)}: place it by Shard({dim}) along the same axes, "
                f"and no others"
            )
    if len(set(sharded.values())) != 1:
        found = ", ".join(f"{name} ({size})" for name, size in sharded.items()) or "none"
        raise ValueError(
            f"{entry.description}: expected parameters of {path} sharded along dim {dim} on these "
            f"axes, all of one size, got: {found}"
        )
    return next(iter(sharded.values()))


def _attributes(entry: EntryRef, module: nn.Module, number: int, own: int) -> dict[str, Any]:
    options = dict(entry.options)
    count, flag = options["count"], options.get("flag")
    for name in (count, flag):
        if name is not None and not hasattr(module, name):
            raise ValueError(
                f"{entry.description}: {type(module).__name__} has no attribute {name!r}"
            )
    if count is not None and getattr(module, count) != number:
        raise ValueError(
            f"{entry.description}: count= expected the attribute with the number of experts, "
            f"{number}, got {count!r}, which is {getattr(module, count)!r}"
        )
    values = {count: own, flag: True}
    return {name: value for name, value in values.items() if name is not None}
