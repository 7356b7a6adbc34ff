"""Meshes of any shape in one process, over torch's fake process group."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_mesh(
    shape: Sequence[int],
    names: Sequence[str] | None = None,
    *,
    rank: int = 0,
    device_type: str = "cpu",
) -> Iterator[DeviceMesh]:
    """Plays one rank of a mesh without any other process.

    Collectives return at once and leave their outputs as allocated: shapes, placements and counts
    are right, received values are not. Everything that needs no communication is exact.

    Args:
        shape: size of each mesh axis, e.g. ``(2, 4)``; the world is their product.
        names: one name per axis, or None.
        rank: the global rank to play, in ``range(prod(shape))``.
        device_type: device type of the mesh; no such device is needed for ``"cuda"``.

    Yields:
        The mesh. On exit its process groups are destroyed and torch's caches cleared.

    Raises:
        ValueError: a size below 1, a rank outside the mesh, or names that do not fit the shape.
        RuntimeError: a process group already exists.
    """
    sizes = _checked_sizes(shape, names)
    world_size = math.prod(sizes)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"fake_mesh: rank={rank} is outside a mesh of shape {sizes}; "
            f"give a rank from 0 to {world_size - 1}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_mesh: a {dist.get_backend()} process group of {dist.get_world_size()} ranks "
            "already exists; leave the other fake_mesh, or call dist.destroy_process_group() first"
        )
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        yield init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names) if names else None)
    finally:
        if dist.is_initialized():  # the body may have destroyed it
            dist.destroy_process_group()
        clear_caches()


def each_rank(
    shape: Sequence[int], names: Sequence[str] | None = None
) -> Iterator[tuple[int, DeviceMesh]]:
    """Plays every rank of a mesh, one after another, in this process.

    For tests that put all shards together: each rank's local part is computed in its own turn.
    A mesh is usable only during its turn; leaving the loop early ends the current one.

    Args:
        shape: size of each mesh axis.
        names: one name per axis, or None.

    Yields:
        `(rank, mesh)`, in order of rank.

    Raises:
        ValueError: a size below 1, or names that do not fit the shape.
        RuntimeError: a process group already exists.
    """
    for rank in range(math.prod(_checked_sizes(shape, names))):
        with fake_mesh(shape, names, rank=rank) as mesh:
            yield rank, mesh


def clear_caches() -> None:
    """Forgets what torch keeps from one process group to the next.

    DTensor caches results that hold mesh objects (sharding propagation in Python and C++,
    redistribution plans, mesh topology), and compares meshes by shape: after
    `destroy_process_group` an equal mesh would be served results that belong to the dead one.
    The two propagation caches are per thread; this clears the calling thread's.
    """
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor import DTensor, _collective_utils, _random, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _random._rng_tracker = None
    _mesh_resources.mesh_stack.clear()
    if "torch._dynamo" in sys.modules:  # compiled graphs hold group names
        torch._dynamo.reset()


def _checked_sizes(shape: Sequence[int], names: Sequence[str] | None) -> tuple[int, ...]:
    if isinstance(shape, int):
        raise ValueError(f"fake_mesh: shape={shape} must be a sequence; give ({shape},)")
    sizes = tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"fake_mesh: shape={sizes} must hold one size of at least 1 per axis")
    if names is not None and len(tuple(names)) != len(sizes):
        raise ValueError(
            f"fake_mesh: names={tuple(names)} must be one name per axis of shape {sizes}"
        )
    return sizes
