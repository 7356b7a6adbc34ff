"""The fsdp package, found by entry point and never imported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.entry import Entry
from plan_api.resolve import is_inside

__all__ = ["GROUP", "apply_fully_shard", "find_fully_shard", "placed_until_sharded"]

GROUP = "plan_api.fully_shard"


def find_fully_shard(entry: Entry) -> Callable[..., Any]:
    """The function that a package has registered as ``plan_api.fully_shard``.

    It is called as ``fully_shard(module, mesh=, granularity=, reshard_after_forward=)``.

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


def apply_fully_shard(model: nn.Module, entries: Mapping[str, Entry], mesh: DeviceMesh) -> None:
    """Applies it to modules, the innermost first, as it wants to be.

    Args:
        model: whose parameters are placed already.
        entries: by module path, the last that names it.
        mesh: the plan's.
    """
    for path in sorted(entries, key=lambda path: -path.count(".") if path else 1):
        entry = entries[path]
        find_fully_shard(entry)(
            model.get_submodule(path), mesh=mesh[entry.axes], **dict(entry.options)
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
    axis = (mesh.mesh_dim_names or ()).index(entries[max(inside, key=len)].axes[-1])
    cut = {getattr(one, "dim", None) for one in rest}  # by stock's shards, and ragged-shard's
    free = [dim for dim in range(tensor.ndim) if dim not in cut]
    if not free or not isinstance(rest[axis], Replicate):
        return rest
    return (*rest[:axis], Shard(free[0]), *rest[axis + 1 :])
