"""Private names of torch that this package uses, and the differences between torch 2.11 and 2.15.

tests/test_compat.py and test_patch_points.py have a canary for each: it fails when the difference
or the name is gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import _functional_collectives as funcol
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# 2.13 renamed these two, and warns about the old names.
_Collective = Callable[..., torch.Tensor]
all_gather: _Collective = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
broadcast: _Collective = funcol.broadcast
reduce_scatter: _Collective = (
    getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
)

is_tracing: Callable[[], bool] = funcol._are_we_tracing


def merges_collectives() -> bool:
    """Returns whether torch's flag allows collectives over several mesh axes to be merged."""
    return not _redistribute._DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION


def flattened_mesh(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh | None:
    """Returns the mesh that these axes, ascending, were flattened into; None if they were not."""
    return _redistribute._get_flattened_mesh_by_layout(mesh, axes)


def default_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the default group if its ranks are the mesh's, in the same order; else None.

    It must also support the mesh's device type.
    """
    world: Any = distributed_c10d._get_default_group()
    if mesh.mesh.flatten().tolist() != list(range(world.size())):
        return None
    group: dist.ProcessGroup = world
    return group if torch.device(mesh.device_type) in world._device_types else None


_FIELDS = {field.name for field in dataclasses.fields(DTensorSpec)}


def make_spec(
    like: DTensorSpec, placements: tuple[Placement, ...], tensor_meta: TensorMeta
) -> DTensorSpec:
    """Makes a spec on the mesh of another, with its meaning of `_StridedShard` (2.12 and later)."""
    if "use_strided_shard_as_shard_order" in _FIELDS and any(
        isinstance(placement, _StridedShard) for placement in placements
    ):
        return DTensorSpec(
            like.mesh,
            placements,
            tensor_meta=tensor_meta,
            use_strided_shard_as_shard_order=like.use_strided_shard_as_shard_order,
        )
    return DTensorSpec(like.mesh, placements, tensor_meta=tensor_meta)


def native_local_shape(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """Returns the local shape at a coordinate of a mesh, with torch's placements."""
    local, _ = _utils._compute_local_shape_and_global_offset(
        shape, mesh_shape, list(coordinate), placements, True
    )
    return tuple(local)


def native_offsets(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> tuple[int, ...]:
    """Returns the global offset of the shard at a coordinate of a mesh, with torch's placements."""
    _, offsets = _utils._compute_local_shape_and_global_offset(
        shape, mesh_shape, list(coordinate), placements
    )
    return tuple(offsets)


def clear_native_cache() -> None:
    """Clears this thread's cache of sharding decisions in C++, which torch 2.11 to 2.15 have."""
    torch._C._clear_DTensor_sharding_propagator_cache()


def has_checkpointable_tensors() -> bool:
    """Returns whether DCP takes plain tensors with four attributes for shards (2.14 and later)."""
    return hasattr(dcp, "CheckpointableTensor")
