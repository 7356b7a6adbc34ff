"""Plans redistributions that C++ executes.

Note: a redistribution is a sequence of steps; a step changes the placement on one mesh axis. torch
decides which (its transforms), this module says what each is for this rank, and
`include/dtensor_rules/redistribute.h` runs them with the operators that torch would call. Whatever
is not plain is left to torch, which then does it, or raises, as it always has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed._local_tensor import local_tensor_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from dtensor_rules import _compat
from dtensor_rules._core import (
    AllGather,
    AllReduce,
    AllToAll,
    Axis,
    Chunk,
    Divide,
    Redistribution,
    ReduceScatter,
)

from dtensor_rules.plan import Transform

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtensor_rules._core import Step

#: Partial reductions of a replicated value that give it back, so that it is partial as it is.
_IDEMPOTENT = frozenset({"avg", "min", "max"})


def transform_between(src: DTensorSpec, dst: DTensorSpec) -> Transform:
    """What turns a local tensor of one spec into that of another: steps in C++, or torch's code.

    Args:
        src: of the tensor as it is.
        dst: of the tensor as it should be.
    """
    if (plan := plan_redistribution(src, dst)) is not None:
        return plan

    def by_torch(local: torch.Tensor) -> torch.Tensor:
        return redistribute_local_tensor(local, src, dst)

    return by_torch


class _LeftToTorch(Exception):  # noqa: N818
    """Raised where no step is exactly what torch does."""


def plan_redistribution(src: DTensorSpec, dst: DTensorSpec) -> Redistribution | None:
    """What this rank does to a local tensor of one spec to hold that of another.

    The plan holds for every pair of specs that equal these on meshes with the same process groups,
    until a mesh is flattened (torch then merges collectives of several axes) or one of the flags
    of ``torch.distributed.tensor._redistribute`` changes how torch plans.

    Args:
        src: of the tensor as it is.
        dst: of the tensor as it should be.

    Returns:
        None where it must be left to torch: subclasses of specs and placements, masked partials,
        strided shards that are no shard order, symbolic sizes, tracing, a `LocalTensorMode`, a rank
        outside the mesh, several meshes, and what torch cannot redistribute either.
    """
    if not _is_plain(src, dst):
        return None
    try:
        transforms = _compat.redistribution_transforms(src, dst)
    except Exception:
        return None  # torch raises it again, from where its users know it
    if transforms is None:
        return None
    steps: list[Step] = []
    try:
        for transform in transforms:
            steps += _steps(transform, src.mesh)
    except _LeftToTorch:
        return None
    return Redistribution(steps)


def _is_plain(src: DTensorSpec, dst: DTensorSpec) -> bool:
    """Whether torch may be asked for its transforms of two specs."""
    if type(src) is not DTensorSpec or type(dst) is not DTensorSpec:
        return False
    meta = src.tensor_meta
    if meta is None or any(type(number) is not int for number in (*meta.shape, *meta.stride)):
        return False
    dims = len(meta.shape)
    return (
        all(_is_known(placement, dims) for placement in (*src.placements, *dst.placements))
        and not _are_we_tracing()
        and local_tensor_mode() is None
        and not _compat.compiles_for_other_ranks()
        and src.mesh == dst.mesh
        and src.mesh.get_coordinate() is not None
    )


def _is_known(placement: Placement, dims: int) -> bool:
    kind: Any = type(placement)
    if kind in (Shard, _StridedShard):
        dim: int = placement.dim  # type: ignore[attr-defined]
        return 0 <= dim < dims
    return kind in (Replicate, Partial)


def _steps(transform: Any, mesh: DeviceMesh) -> list[Step]:
    """One of torch's transforms as steps: two for a mean over several axes, none for no change.

    Raises:
        _LeftToTorch: for a transform that is none of those below.
    """
    mesh = getattr(transform, "mesh", mesh)  # that of merged axes, where they are
    dim, count = transform.mesh_dim, mesh.size(transform.mesh_dim)
    src, dst = transform.src_dst_placements
    shape = transform.logical_shape
    if count == 1:
        return []
    steps: list[Step]
    match _kind(src), _kind(dst):
        case "partial", "replicate":
            steps = [AllReduce(_axis(mesh, dim), reduce_op=src.reduce_op.lower())]
        case "partial", "shard":
            reduce_op = src.reduce_op.lower()
            steps = [ReduceScatter(_axis(mesh, dim), dim=dst.dim, reduce_op=reduce_op)]
        case "shard", "replicate":
            return [AllGather(_axis(mesh, dim), dim=src.dim, size=shape[src.dim])]
        case "shard", "shard":
            return [
                AllToAll(
                    _axis(mesh, dim),
                    from_dim=src.dim,
                    to_dim=dst.dim,
                    from_size=shape[src.dim],
                    to_size=shape[dst.dim],
                    by_gather=_compat.all_to_all_gathers(mesh),
                )
            ]
        case "replicate", "shard":
            return [Chunk(_axis(mesh, dim), dim=dst.dim)]
        case "replicate", "partial" if dst.reduce_op == "sum":
            return [Divide(count)]
        case "replicate", "partial" if dst.reduce_op in _IDEMPOTENT:
            return []
        case _:
            raise _LeftToTorch
    if (scale := getattr(transform, "avg_scale", None)) is not None:
        steps.append(Divide(scale))
    return steps


def _kind(placement: Placement) -> str:
    """A placement's class in a word; a strided shard's is none of the words that have steps."""
    return type(placement).__name__.lower()


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Axis(group=mesh.get_group(dim).group_name, size=mesh.size(dim), rank=coordinate[dim])
