"""The fsdp package, found by entry point and never imported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.resolve import is_inside
from plan_api.lowering.schedule import Schedule
from plan_api.spec.axes import axis_names
from plan_api.spec.entry import Entry

__all__ = [
    "GROUP", "apply_fully_shard", "check_fully_shard", "check_phases", "find_fully_shard",
    "fully_sharded_names", "placed_until_sharded",
]  # fmt: skip

GROUP = "plan_api.fully_shard"


def find_fully_shard(entry: Entry) -> Callable[..., Any]:
    """The function that a package has registered as ``plan_api.fully_shard``.

    It is called as ``fully_shard(module, mesh=, granularity=, reshard_after_forward=)``, with
    ``ignored_params=`` where the plan itself cuts parameters along the mesh's axes. Its
    ``check(granularity=)``, if it has one, raises ValueError for a text that it does not know.

    Args:
        entry: that asks for it, for messages.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    for point in entry_points(group=GROUP):
        found: Callable[..., Any] = point.load()
        return found
    raise ModuleNotFoundError(
        f"{entry.said}: no package offers fully_shard (entry point {GROUP!r}): "
        f"pip install fsdp; or place parameters by phases, shard(..., phase=Phase.RUN)"
    )


def apply_fully_shard(
    model: nn.Module,
    entries: Mapping[str, Entry],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> None:
    """Applies it to modules, the innermost first, as FSDP requires.

    Parameters that the plan cuts along the same axes, such as experts, are left as they are.

    Args:
        model: whose parameters are placed already.
        entries: by module path, the last that names it.
        schedules: of parameters, by their first names.
        mesh: the plan's.
    """
    made: dict[tuple[Any, ...], DeviceMesh] = {}  # once: a mesh may have process groups of its own
    for path in sorted(entries, key=lambda path: -path.count(".") if path else 1):
        entry = entries[path]
        options = dict(entry.options)
        key = entry.axes, options.pop("flat", False), options.pop("replicate", 1)
        if key not in made:
            made[key] = _mesh_of(entry, mesh)
        own = made[key]
        left = [
            param
            for name, param in model.named_parameters()
            if is_inside(name, path) and _is_cut(name, entry, schedules, mesh)
        ]
        if left:
            options["ignored_params"] = left
        find_fully_shard(entry)(model.get_submodule(path), mesh=own, **options)


def check_fully_shard(entry: Entry, mesh: DeviceMesh) -> None:
    """Refuses what the package cannot do, before anything is changed.

    Raises:
        ValueError: a granularity that is none, or copies that the ranks do not make up.
        ModuleNotFoundError: no package offers fully_shard.
    """
    check = getattr(find_fully_shard(entry), "check", None)
    if check is not None:
        try:
            check(granularity=dict(entry.options).get("granularity"))
        except ValueError as error:
            raise ValueError(f"{entry.said}: {error}") from None
    _check_copies(entry, mesh)


def check_phases(
    model: nn.Module,
    fully: Mapping[str, Entry],
    schedules: Mapping[str, Schedule],
    entries: Sequence[Entry],
    mesh: DeviceMesh,
) -> None:
    """Refuses parameters of fully sharded modules that have phases along the same axes.

    Args:
        model: any.
        fully: as of `apply_fully_shard`.
        schedules: as of `apply_fully_shard`.
        entries: the plan's.
        mesh: the plan's.

    Raises:
        ValueError: names the parameter and both entries.
    """
    axes = axis_names(mesh)
    for name, schedule in schedules.items():
        inside = [path for path in fully if is_inside(name, path)]
        if not inside:
            continue
        entry = fully[max(inside, key=len)]
        both = [
            axis
            for axis in entry.axes
            if schedule.rest[axes.index(axis)] != schedule.run[axes.index(axis)]
        ]
        if both:
            phases = "; ".join(entries[number].said for number in schedule.entries)
            raise ValueError(
                f"{entry.said}: expected no phases along {', '.join(both)} for {name}, which "
                f"fully_shard gathers and shards there itself, got {phases}; leave out one of them"
            )


def _check_copies(entry: Entry, mesh: DeviceMesh) -> None:
    """Refuses copies that the ranks of an entry do not make up.

    Raises:
        ValueError: naming the axes, their ranks and the copies.
    """
    replicate = dict(entry.options).get("replicate", 1)
    if replicate == 1:
        return
    ranks = mesh[entry.axes].size()
    if len(entry.axes) > 1 or not isinstance(replicate, int) or replicate < 1 or ranks % replicate:
        raise ValueError(
            f"{entry.said}: expected replicate= on one axis, a number of copies that divides its "
            f"ranks; got {replicate!r} on axes {entry.axes} of {ranks} ranks. To replicate on an "
            f"axis of its own, name two axes and leave replicate= out"
        )


def _mesh_of(entry: Entry, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that an entry shards on: its axes, these as one, or one axis as two."""
    options, own = dict(entry.options), mesh[entry.axes]
    if options.get("flat") and own.ndim > 1:
        return own._flatten()
    copies = options.get("replicate", 1)
    if copies == 1:
        return own
    (axis,) = entry.axes
    sizes = (copies, own.size() // copies)
    return own._unflatten(axis, sizes, (f"{axis}_replicate", f"{axis}_shard"))


def fully_sharded_names(
    model: nn.Module,
    entries: Mapping[str, Entry],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> frozenset[str]:
    """The first names of the parameters whose gradients fully_shard reduces.

    Args:
        model: any.
        entries: as of `apply_fully_shard`.
        schedules: as of `apply_fully_shard`.
        mesh: the plan's.
    """
    first = {id(param): name for name, param in model.named_parameters()}
    found = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        inside = [path for path in entries if is_inside(name, path)]
        if inside and not _is_cut(first[id(param)], entries[max(inside, key=len)], schedules, mesh):
            found.add(first[id(param)])
    return frozenset(found)


def _is_cut(name: str, entry: Entry, schedules: Mapping[str, Schedule], mesh: DeviceMesh) -> bool:
    """Whether a parameter is cut along an entry's axes while its module runs."""
    schedule, axes = schedules.get(name), axis_names(mesh)
    return schedule is not None and any(
        not schedule.run[axes.index(axis)].is_replicate() for axis in entry.axes
    )


def placed_until_sharded(
    name: str,
    tensor: torch.Tensor,
    rest: tuple[Placement, ...],
    entries: Mapping[str, Entry],
    mesh: DeviceMesh,
) -> tuple[Placement, ...]:
    """As what a parameter is made that is about to be fully sharded: nowhere a whole copy.

    Along the axis that will shard it, some dim is that no other axis cuts; if there is none it is
    made whole.

    Args:
        name: of the parameter.
        tensor: the parameter, whose shape counts.
        rest: its placements at rest, whole along that axis.
        entries: of what will be fully sharded, by module path.
        mesh: the plan's.
    """
    inside = [path for path in entries if is_inside(name, path)]
    if not inside or not isinstance(tensor, nn.Parameter):
        return rest
    axes = [axis_names(mesh).index(axis) for axis in entries[max(inside, key=len)].axes]
    if not all(isinstance(rest[axis], Replicate) for axis in axes):
        return rest  # fully_shard leaves it out
    axis = axes[-1]
    cut = {getattr(one, "dim", None) for one in rest}  # by stock's shards, and ragged-shard's
    free = [dim for dim in range(tensor.ndim) if dim not in cut]
    if not free:
        return rest
    return (*rest[:axis], Shard(free[0]), *rest[axis + 1 :])
