"""The mesh of data parallelism: one axis that shards, and one that replicates for HSDP."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = ["checked_mesh", "device_of", "sharded_placements"]


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that was given, or one of all ranks.

    Raises:
        ValueError: it has neither one axis nor two, or this rank is not in it.
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        return init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"fully_shard: mesh={mesh!r}; wants a DeviceMesh")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"fully_shard: mesh has {mesh.ndim} axes {tuple(mesh.shape)}; wants one (FSDP) or two "
            f"(HSDP: replicate, shard); slice it by name, mesh['dp'], or flatten axes"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"fully_shard: this rank is not in {mesh}; call it on the mesh's ranks")
    return mesh


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where parameters are computed with."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def sharded_placements(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Of a buffer whose shards lie along the last axis."""
    return (*[Replicate()] * (mesh.ndim - 1), Shard(0))
