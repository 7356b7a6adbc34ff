"""A world of any size on one process, of which this process is a rank: nothing is sent.

`simulate` may be called where torch.distributed is initialized, as `probe` does on real ranks. So
the fake world has process groups of its own: `torch.distributed.distributed_c10d._world`, an
"experimental extension point to override it", is replaced and restored. Names of groups are
registered by torch for the whole process, so those of the fake world have numbers that no other
group reaches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp.simulate.machine import MeshSize

__all__ = ["fake_world"]

_FIRST_GROUP, _GROUPS_OF_WORLD = 10**9, 10**6
_worlds = count()


class _FakeWorld(c10d._World):
    """The state of process groups, apart from that of the module `distributed_c10d`."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.group_count = _FIRST_GROUP + next(_worlds) * _GROUPS_OF_WORLD


@contextmanager
def fake_world(
    size: MeshSize, device_type: str, *, with_replicas: bool = False
) -> Iterator[DeviceMesh]:
    """Makes this process rank 0 of a fake world, within the context.

    Args:
        size: of the world and its mesh, whose axes are "replicate", if there are replicas, and
            "shard".
        device_type: of the mesh; no such device is needed.
        with_replicas: whether the mesh has its axis "replicate" for a single one, too.

    Yields:
        The mesh of all ranks.
    """
    before, hook = c10d._world, sys.excepthook
    init_method = c10d._default_pg_init_method
    world = c10d._world = _FakeWorld()
    _clear_caches()
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size.ranks)
        names = ("replicate", "shard") if with_replicas or size.replicate > 1 else ("shard",)
        shape = (size.replicate, size.shard)[-len(names) :]
        yield init_device_mesh(device_type, shape, mesh_dim_names=names)
    finally:
        for group in world.pg_map:
            c10d._unregister_process_group(group.group_name)
        c10d._world, sys.excepthook = before, hook
        c10d._default_pg_init_method = init_method
        c10d._update_default_pg(before.default_pg)
        _clear_caches()


def _clear_caches() -> None:
    """Clears what DTensor caches by meshes, which are compared by shape and not by their groups."""
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
