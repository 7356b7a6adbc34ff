"""The mesh of data parallelism: one axis that shards, or two, (replicate, shard)."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp._compat import ordered_group

__all__ = [
    "checked_mesh",
    "checked_reshard",
    "device_of",
    "optimizer_mesh",
    "post_forward_mesh",
    "replica_mesh",
    "sharded_placements",
]

# Attribute of a root mesh: others of the ranks of its slices, by what they are for.
_MESHES = "_fsdp_meshes"


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns the mesh, or one of all ranks where it is None.

    Raises:
        ValueError: it has neither one axis nor two, or this rank is not in it.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        return init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh: expected a DeviceMesh, got {mesh!r}")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard expects a 1D or 2D DeviceMesh, of one axis (FSDP) or two (HSDP: "
            f"replicate, shard), got {mesh.ndim} axes {tuple(mesh.shape)}; slice the mesh by name, "
            f"mesh['dp'], or flatten axes"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"fully_shard: this rank is not in {mesh}; call it on the mesh's ranks")
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def sharded_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Returns the placements of a buffer that is sharded along the last axis."""
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))


def checked_reshard(reshard_after_forward: object, size: int) -> tuple[bool, int | None]:
    """Returns whether to reshard after forward, and over how many ranks; None means all.

    Args:
        reshard_after_forward: as of `fully_shard`.
        size: ranks of the axis that shards.

    Raises:
        ValueError: it is neither a bool, None, nor a divisor of the axis that shards.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward is not False, None
    number = 0
    if isinstance(reshard_after_forward, SupportsIndex):
        number = operator.index(reshard_after_forward)
    if number < 1 or size % number:
        raise ValueError(
            f"fully_shard: reshard_after_forward should be a bool, None or an int, which should be "
            f"a factor of {size}, the ranks of the axis that shards, got {reshard_after_forward!r}"
        )
    if number == 1:
        warnings.warn(
            "fully_shard: reshard_after_forward=1 keeps all parameters after forward, as False "
            "does; True reshards them to all ranks",
            stacklevel=3,
        )
        return False, None
    return True, None if number == size else number


def post_forward_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Returns a mesh of two axes, of the ranks that shard, the last of `size` neighbours.

    It is made once. Axes with names are split in their root mesh, where ranks of other axes, as of
    tensor parallelism, make their own at the same time.
    """

    def make() -> DeviceMesh:
        if mesh.mesh_dim_names is None:
            return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size))
        name = mesh.mesh_dim_names[-1]
        names = (f"{name}_replicate_after_forward_{size}", f"{name}_shard_after_forward_{size}")
        axis = mesh if mesh.ndim == 1 else mesh[name]
        return axis._unflatten(0, (axis.size() // size, size), names)

    return _made_once(mesh, f"post-forward {size}", make)


def optimizer_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns a mesh of one axis, of all ranks of (replicate, shard), replicas side by side.

    So the parts that the replicas of a shard update follow each other. It is made once.
    """

    def make() -> DeviceMesh:
        names = mesh.mesh_dim_names
        name = "shard_replicate" if names is None else f"{names[1]}_{names[0]}"
        group = ordered_group(mesh.mesh.t().flatten().tolist())
        return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=(name,))

    return _made_once(mesh, "optimizer", make)


def replica_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the replicate axis of (replicate, shard), which may have no names; made once."""
    group = mesh.get_group(0)
    return _made_once(mesh, "replicas", lambda: DeviceMesh.from_group(group, mesh.device_type))


def _made_once(mesh: DeviceMesh, what: str, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Returns the mesh that a call for the same ranks has made: each slice is another object."""
    root = mesh._get_root_mesh()
    made: dict[object, DeviceMesh] = root.__dict__.setdefault(_MESHES, {})
    key = (what, mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    if key not in made:
        made[key] = make()
    return made[key]
