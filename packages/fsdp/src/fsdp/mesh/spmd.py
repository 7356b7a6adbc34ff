"""A mesh of all parallelism, and which of its axes are those of data parallelism.

Source: ``dp_mesh_dims`` of torch/distributed/fsdp/_fully_shard, since torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp._compat import TORCH_HAS_MESH_DIMS

__all__ = ["DataParallelMeshDims", "check_on_spmd_mesh", "data_parallel_mesh"]

if TORCH_HAS_MESH_DIMS and not TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:

    @dataclass(frozen=True)
    class DataParallelMeshDims:
        """torch's class of this name, for torch 2.11 and 2.12.

        Attributes:
            shard: the axes along which parameters are sharded.
            replicate: the axes along which they are replicated.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "At least one of shard or replicate must be set in DataParallelMeshDims"
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The axes along which parameters are sharded."""
            return _as_tuple(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The axes along which parameters are replicated."""
            return _as_tuple(self.replicate)

    def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return (names,) if isinstance(names, str) else tuple(names or ())


def data_parallel_mesh(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> DeviceMesh:
    """Returns the mesh of one axis that shards, or of two, (replicate, shard).

    Args:
        mesh: of all parallelism.
        dims: its axes of data parallelism. Several of one kind become one axis; where none shards,
            an axis of one rank does.

    Raises:
        ValueError: the mesh has no names, or not these.
    """
    names = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or names is None:
        raise ValueError(
            "fully_shard: dp_mesh_dims: expected mesh= with mesh_dim_names, which it names, got "
            f"{mesh!r}"
        )
    for name in (*dims.shard_names, *dims.replicate_names):
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
        params: of a call of fully_shard, with their names.
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
