"""Meshes of `fully_shard`.

`data_parallel` is the mesh of one or two axes that it uses, `spmd` the choice of these axes from a
mesh of all parallelism, `roles` what is placed how on them, `placement` what is known of parameters
that are DTensors, `annotations` of those that spmd_types annotates. `granularity` has the runs of
elements that sharding keeps together.
"""

from fsdp.mesh.annotations import SpmdMesh, annotation_of, no_typecheck, typed_as_local
from fsdp.mesh.data_parallel import (
    checked_mesh,
    checked_reshard,
    device_of,
    optimizer_mesh,
    post_forward_mesh,
    replica_mesh,
    sharded_placements,
)
from fsdp.mesh.placement import (
    ParamPlacement,
    block_on_inner_axes,
    placement_of,
    spec_with_dtype,
)
from fsdp.mesh.roles import STRATEGIES, Roles, checked_roles
from fsdp.mesh.spmd import check_on_spmd_mesh, data_parallel_mesh

__all__ = [
    "STRATEGIES",
    "ParamPlacement",
    "Roles",
    "SpmdMesh",
    "annotation_of",
    "block_on_inner_axes",
    "check_on_spmd_mesh",
    "checked_mesh",
    "checked_reshard",
    "checked_roles",
    "data_parallel_mesh",
    "device_of",
    "no_typecheck",
    "optimizer_mesh",
    "placement_of",
    "post_forward_mesh",
    "replica_mesh",
    "sharded_placements",
    "spec_with_dtype",
    "typed_as_local",
]
