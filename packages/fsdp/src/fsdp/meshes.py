"""The mesh of data parallelism: one axis that shards, and one that replicates for HSDP."""

from __future__ import annotations

import operator
import warnings
from typing import SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "backward_mesh",
    "checked_mesh",
    "checked_reshard",
    "device_of",
    "sharded_placements",
]

_SMALLER = "_fsdp_backward_meshes"  # on a mesh: those of backward, by the ranks of their last axis


def checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that was given, or one of all ranks.

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


def checked_reshard(given: object, size: int) -> tuple[bool, int | None]:
    """Whether parameters are resharded after forward, and to how many ranks if not to all.

    Args:
        given: ``reshard_after_forward``.
        size: ranks of the axis that shards.

    Raises:
        ValueError: neither a bool, None, nor a divisor of the axis that shards.
    """
    if given is None or isinstance(given, bool):
        return given is not False, None
    number = operator.index(given) if isinstance(given, SupportsIndex) else 0
    if number < 1 or size % number:
        raise ValueError(
            f"fully_shard: reshard_after_forward={given!r}; wants True, False, None, or a number "
            f"that divides the {size} ranks of the axis that shards"
        )
    if number == 1:
        warnings.warn(
            "fully_shard: reshard_after_forward=1 keeps all parameters after forward, as False "
            "does; True reshards them to all ranks",
            stacklevel=3,
        )
        return False, None
    return True, None if number == size else number


def backward_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """A mesh of the same ranks whose last axis has `size` that are neighbours; made once."""
    made: dict[int, DeviceMesh] = mesh.__dict__.setdefault(_SMALLER, {})
    if size not in made:
        made[size] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size))
    return made[size]
