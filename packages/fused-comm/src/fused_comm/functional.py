"""Collectives by name on DTensors, with autograd.

Each is the redistribution that the collective performs, and checks that it is called on a group of
the tensor's mesh ("Collective operators" of the DTensor status post).
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fused_comm.redistribute import redistribute_many

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def all_reduce(tensor: DTensor, group: dist.ProcessGroup) -> DTensor:
    """Redistributes from Partial along a group to Replicate.

    Args:
        tensor: Partial on the group's axes.
        group: of one axis of the tensor's mesh, or of several together.

    Raises:
        ValueError: the group is not of axes of the mesh, or the tensor is not Partial there.
    """
    return _redistribute("all_reduce", tensor, group, Partial, Replicate())


def all_gather(tensor: DTensor, group: dist.ProcessGroup) -> DTensor:
    """Redistributes from Shard along a group to Replicate.

    Args:
        tensor: Shard on the group's axes.
        group: as in `all_reduce`.

    Raises:
        ValueError: the group is not of axes of the mesh, or the tensor is not Shard there.
    """
    return _redistribute("all_gather", tensor, group, Shard, Replicate())


def reduce_scatter(tensor: DTensor, dim: int, group: dist.ProcessGroup) -> DTensor:
    """Redistributes from Partial along a group to Shard(dim).

    Args:
        tensor: Partial on the group's axes.
        dim: of the tensor, to shard; may be negative.
        group: as in `all_reduce`.

    Raises:
        ValueError: the group is not of axes of the mesh, or the tensor is not Partial there.
    """
    return _redistribute("reduce_scatter", tensor, group, Partial, Shard(dim % tensor.ndim))


def all_to_all(tensor: DTensor, dim: int, group: dist.ProcessGroup) -> DTensor:
    """Redistributes from Shard along a group to Shard(dim).

    Args:
        tensor: Shard on the group's axes.
        dim: of the tensor, to shard; may be negative.
        group: as in `all_reduce`.

    Raises:
        ValueError: the group is not of axes of the mesh, or the tensor is not Shard there.
    """
    return _redistribute("all_to_all", tensor, group, Shard, Shard(dim % tensor.ndim))


def _redistribute(
    name: str,
    tensor: DTensor,
    group: dist.ProcessGroup,
    source: type[Placement],
    target: Placement,
) -> DTensor:
    placements = list(tensor.placements)
    for axis in _axes(name, tensor, group):
        if not isinstance(placements[axis], source):
            raise ValueError(
                f"{name}: expected {source.__name__} on axis {axis} of the tensor's mesh, got "
                f"{placements[axis]}; redistribute the tensor first"
            )
        placements[axis] = target
    (result,) = redistribute_many([tensor], placements)
    return result


def _ranks(mesh: DeviceMesh, axis: int) -> set[int]:
    return set(dist.get_process_group_ranks(mesh.get_group(axis)))


def _axes(name: str, tensor: DTensor, group: dist.ProcessGroup) -> list[int]:
    """Returns the axes of the mesh along which the group's ranks are."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    ranks = set(dist.get_process_group_ranks(group))
    if coordinate is not None:
        axes = [axis for axis in range(mesh.ndim) if _ranks(mesh, axis) <= ranks]
        selection = tuple(slice(None) if a in axes else index for a, index in enumerate(coordinate))
        if axes and set(mesh.mesh[selection].flatten().tolist()) == ranks:
            return axes
    raise ValueError(
        f"{name}: the group of ranks {sorted(ranks)} is not that of any axes of the tensor's {mesh}"
    )
