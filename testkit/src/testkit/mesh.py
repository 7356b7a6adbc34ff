"""Meshes of any shape in one process, with torch's fake process group."""

from __future__ import annotations

import math
import sys
import warnings
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
    """Makes a mesh of which this process is one rank, without other processes.

    Collectives return at once and do not write their outputs: shapes, placements and counts are
    correct, received values are not. Everything that needs no communication is exact.

    Args:
        shape: the size of each mesh axis, e.g. ``(2, 4)``; their product is the world size.
        names: one name per axis, or None.
        rank: the global rank of this process, in ``range(prod(shape))``.
        device_type: of the mesh; ``"cuda"`` does not need such a device.

    Yields:
        the mesh. On exit its process groups are destroyed and torch's caches cleared.

    Raises:
        ValueError: a size is below 1, the rank is outside of the mesh, or the names do not fit the
            shape.
        RuntimeError: a process group already exists.
    """
    sizes = _checked_sizes(shape, names)
    world_size = math.prod(sizes)
    if not 0 <= rank < world_size:
        raise ValueError(
            f"fake_mesh: expected rank= from 0 to {world_size - 1} for a mesh of shape {sizes}, "
            f"got {rank}"
        )
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_mesh: expected no process group, got a {dist.get_backend()} group of "
            f"{dist.get_world_size()} ranks; leave the other fake_mesh, or call "
            f"dist.destroy_process_group() first"
        )
    try:
        known = device_type in dist.Backend.default_device_backend_map
        backend = "fake" if device_type in ("cpu", "cuda") or not known else f"{device_type}:fake"
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)
        yield init_device_mesh(device_type, sizes, mesh_dim_names=tuple(names) if names else None)
    finally:
        if dist.is_initialized():  # the body may have destroyed it
            dist.destroy_process_group()
        clear_caches()


@contextmanager
def mesh_of_one(device_type: str) -> Iterator[DeviceMesh]:
    """Makes a mesh of this process alone, with the real process group of a device.

    The first device becomes the current one, without which torch warns and libraries of CUDA fail
    on threads of autograd.

    Args:
        device_type: ``"cpu"`` with gloo, ``"cuda"`` with NCCL, and others with their default.

    Yields:
        the mesh, of shape ``(1,)``. On exit its process group is destroyed and torch's caches are
        cleared.
    """
    backend = dist.get_default_backend_for_device(device_type)
    if device_type != "cpu":
        torch.accelerator.set_device_index(0)
        torch.ones(1, device=device_type)  # makes the context of the device
    try:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        yield init_device_mesh(device_type, (1,), mesh_dim_names=("dp",))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_caches()


def each_rank(
    shape: Sequence[int], names: Sequence[str] | None = None
) -> Iterator[tuple[int, DeviceMesh]]:
    """Makes this process each rank of a mesh, one after another.

    For tests that assemble all shards: each iteration computes the local tensor of one rank. A mesh
    may be used only in its iteration; leaving the loop early destroys it.

    Args:
        shape: the size of each mesh axis.
        names: one name per axis, or None.

    Yields:
        `(rank, mesh)`, in the order of ranks.

    Raises:
        ValueError: a size is below 1, or the names do not fit the shape.
        RuntimeError: a process group already exists.
    """
    for rank in range(math.prod(_checked_sizes(shape, names))):
        with fake_mesh(shape, names, rank=rank) as mesh:
            yield rank, mesh


def clear_redistribution_caches() -> None:
    """Clears torch's caches of redistribution plans.

    Later plans depend on them, as torch's planners keep the targets of earlier redistributions.
    """
    from torch.distributed.tensor import _redistribute

    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()


def clear_caches() -> None:
    """Clears torch's caches that outlast a process group.

    DTensor caches results with mesh objects (sharding propagation in Python and C++,
    redistribution plans, mesh topology), and compares meshes by shape: after
    `destroy_process_group` an equal mesh would get results of the destroyed one. The two
    propagation caches are per thread; this clears the calling thread's.
    """
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor import DTensor, _collective_utils, _random

    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    type(propagator)._propagate_tensor_meta_cached.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    clear_redistribution_caches()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _random._rng_tracker = None
    _mesh_resources.mesh_stack.clear()
    if "torch._dynamo" in sys.modules:  # compiled graphs have group names
        with warnings.catch_warnings():
            # Where there is CUDA it imports inductor, of whose modules some are deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch._dynamo.reset()


def _checked_sizes(shape: Sequence[int], names: Sequence[str] | None) -> tuple[int, ...]:
    if isinstance(shape, int):
        raise ValueError(f"fake_mesh: expected shape= of a sequence, got {shape}; pass ({shape},)")
    sizes = tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"fake_mesh: expected shape= of one size >= 1 per axis, got {sizes}")
    if names is not None and len(tuple(names)) != len(sizes):
        raise ValueError(
            f"fake_mesh: expected names= of one name per axis of shape {sizes}, got {tuple(names)}"
        )
    return sizes
