"""The fsdp package, found by entry point and never imported by name, and what it will shard."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import FullyShard, Schedule
from plan_api.lowering.model_names import is_inside
from plan_api.spec.axes import axis_names

__all__ = [
    "GROUP",
    "entry_for",
    "find_fully_shard",
    "is_sharded_by_plan",
    "names_reduced_by_fsdp",
]

GROUP = "plan_api.fully_shard"


def find_fully_shard(entry: FullyShard) -> Callable[..., Any]:
    """Loads the function that a package has registered as ``plan_api.fully_shard``.

    It is called as ``fully_shard(module, mesh=, granularity=, reshard_after_forward=)``, with
    ``ignored_params=`` where the plan itself shards parameters along the mesh's axes, and
    ``placements=``, ``mp_policy=`` and ``offload_policy=`` where the entry has them. Its
    ``check(granularity=)``, if it has one, raises ValueError for an unknown granularity. With
    placements it also takes ``placements=``, ``reshard_after_forward=``, ``ndim=``, the number of
    the mesh's axes, and ``other_axes=``, the names of those that the plan has beside them, and
    raises for placements that these refuse.

    Static mode adds ``grad_placements_fn=``, which returns the placements of a parameter's gradient
    (modules compute with its local tensor then), or None (with the DTensor). ``unsharded(model)``
    is a context manager in which all parameters of the model are gathered, and no gradients are
    reduced.

    Args:
        entry: that asks for it, for messages.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    found = _registered(tuple(sys.path))
    if found is None:
        raise ModuleNotFoundError(
            f"{entry.description}: no package offers fully_shard (entry point {GROUP!r}): "
            f"pip install fsdp; or place parameters by phases, shard(..., phase=Phase.RUN)"
        )
    return found


@functools.cache  # of a search through the metadata of all installed packages
def _registered(_path: tuple[str, ...]) -> Callable[..., Any] | None:
    for point in entry_points(group=GROUP):
        found: Callable[..., Any] = point.load()
        return found
    return None


def entry_for(name: str, entries: Mapping[str, FullyShard]) -> FullyShard | None:
    """Returns the entry of the innermost fully sharded module with a parameter, or None.

    Args:
        name: of the parameter.
        entries: by module path.
    """
    inside = [path for path in entries if is_inside(name, path)]
    return entries[max(inside, key=len)] if inside else None


def is_sharded_by_plan(
    name: str, entry: FullyShard, schedules: Mapping[str, Schedule], mesh: DeviceMesh
) -> bool:
    """Whether the plan itself shards a parameter along an entry's axes, while its module runs."""
    schedule, axes = schedules.get(name), axis_names(mesh)
    return schedule is not None and any(
        not schedule.run[axes.index(axis)].is_replicate() for axis in entry.axes
    )


def names_reduced_by_fsdp(
    model: nn.Module,
    entries: Mapping[str, FullyShard],
    schedules: Mapping[str, Schedule],
    mesh: DeviceMesh,
) -> frozenset[str]:
    """Returns the first names of the parameters whose gradients fully_shard reduces.

    Args:
        model: any.
        entries: by module path, the last that names it.
        schedules: of parameters, by their first names.
        mesh: of the plan.
    """
    first_names = {id(param): name for name, param in model.named_parameters()}
    found = set()
    for name, param in model.named_parameters(remove_duplicate=False):
        entry, first = entry_for(name, entries), first_names[id(param)]
        if entry is not None and not is_sharded_by_plan(first, entry, schedules, mesh):
            found.add(first)
    return frozenset(found)
