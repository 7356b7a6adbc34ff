"""A mesh of all parallelism, and which of its axes are those of data parallelism.

Source: ``dp_mesh_dims`` of torch/distributed/fsdp/_fully_shard, since torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp._compat import DataParallelMeshDims

__all__ = ["check_on_spmd_mesh", "data_parallel_mesh"]


def data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DeviceMesh:
    """Returns the mesh of one axis that shards, or of two, (replicate, shard).

    Args:
        mesh: of all parallelism.
        dims: its axes of data parallelism. Several of one kind become one axis; where none shards,
            an axis of one rank does.

    Raises:
        ValueError: the mesh has no names, or not these; an axis is named twice.
    """
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            "fully_shard: dp_mesh_dims: expected mesh= with mesh_dim_names, which it names, got "
            f"{mesh!r}"
        )
    axes = (*dims.shard_names, *dims.replicate_names)
    for name in axes:
        if axes.count(name) > 1:
            raise ValueError(
                f"fully_shard: dp_mesh_dims: expected each axis once, got {name!r} twice in {dims}"
            )
        if name not in names:
            raise ValueError(
                f"fully_shard: dp_mesh_dims: expected names of the mesh's axes {names}, got "
                f"{name!r}: Mesh dim name {name!r} not found in mesh.mesh_dim_names"
            )
    if not dims.shard_names:
        replicated = _one_axis(mesh, dims.replicate_names)
        (name,) = replicated.mesh_dim_names or ()
        return replicated._unflatten(0, (replicated.size(), 1), (name, f"{name}_unsharded"))
    sharded = _one_axis(mesh, dims.shard_names)
    if not dims.replicate_names:
        return sharded
    return DeviceMesh._concatenate([_one_axis(mesh, dims.replicate_names), sharded])


def _one_axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def check_on_spmd_mesh(
    params: Iterable[tuple[str, torch.Tensor]],
    mesh: DeviceMesh | None,
    dims: DataParallelMeshDims,
) -> None:
    """Refuses parameters that are not replicated along the axes of data parallelism.

    Args:
        params: of a call of fully_shard that are not annotated, with their names.
        mesh: of all parallelism.
        dims: its axes of data parallelism.

    Raises:
        ValueError: a parameter is a plain tensor, or a DTensor on another mesh or placed otherwise.
    """
    for name, param in params:
        if not isinstance(param, DTensor):
            raise ValueError(
                "fully_shard: When dp_mesh_dims is provided, all parameters must be DTensors on "
                f"the full SPMD mesh (e.g. via distribute_module). Got plain tensor for parameter "
                f"{name!r}"
            )
        if param.device_mesh != mesh:
            raise ValueError(
                f"fully_shard: Expected param's DTensor mesh to be the same mesh passed to "
                f"fully_shard, but got different mesh objects for parameter {name!r}: "
                f"{param.device_mesh} and {mesh}"
            )
        for kind, axes in (("shard", dims.shard_names), ("replicate", dims.replicate_names)):
            for axis in axes:
                placement = param.placements[(mesh.mesh_dim_names or ()).index(axis)]
                if not isinstance(placement, Replicate):
                    raise ValueError(
                        f"fully_shard: Expected Replicate() on DP {kind} dim {axis!r} for "
                        f"parameter {name!r} but got {placement}"
                    )
