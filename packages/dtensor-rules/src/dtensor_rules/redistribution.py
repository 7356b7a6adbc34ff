"""Plans redistributions that C++ executes.

Note: a redistribution is a sequence of steps; a step changes the placement on one mesh axis, or
gathers several. torch decides which (its transforms), `gathers.py` merges gathers, this module says
what each is for this rank, and `redistribute.h` runs them with the operators that torch would call.
Whatever is not plain is left to torch, which then does it, or raises, as it always has.
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
    StridedChunk,
    StridedGather,
)
from dtensor_rules.gathers import MultiAxisShard, Transforms, merge_transforms
from dtensor_rules.plan import Transform

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dtensor_rules._core import Step

_KINDS: dict[type, str] = {
    Replicate: "replicate",
    Partial: "partial",
    Shard: "shard",
    _StridedShard: "strided",
}

#: Partial reductions of a replicated value that give it back, so that it is partial as it is.
_IDEMPOTENT = frozenset({"avg", "min", "max"})


def transform_between(src: DTensorSpec, dst: DTensorSpec) -> Transform:
    """Returns the steps in C++, or torch's code, that redistribute between two specs.

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
    """Plans this rank's steps that redistribute a local tensor from one spec to another.

    The plan holds for every pair of specs that equal these on meshes with the same process groups,
    until a mesh is flattened (collectives of its axes are then merged) or one of the flags of
    ``torch.distributed.tensor._redistribute`` changes how torch plans.

    Args:
        src: of the tensor as it is.
        dst: of the tensor as it should be.

    Returns:
        None where it must be left to torch: subclasses of specs and placements, masked partials,
        strided shards that are no shard order and whose pieces differ or whose mesh has several
        axes, symbolic sizes, tracing, a `LocalTensorMode`, a rank outside the mesh, two meshes,
        and what torch cannot redistribute either.
    """
    if not _is_plain(src, dst):
        return None
    try:
        transforms = Transforms(_compat.redistribution_transforms(src, dst), src.shape)
    except Exception:
        return None  # torch raises it again, from where its users know it
    steps: list[Step] = []
    try:
        for transform in merge_transforms(transforms, src.mesh, src.placements, dst.placements):
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
    kind = _KINDS.get(type(placement))
    if kind in ("shard", "strided"):
        dim: int = placement.dim  # type: ignore[attr-defined]
        return 0 <= dim < dims
    return kind is not None


def _steps(transform: Any, mesh: DeviceMesh) -> list[Step]:
    """Returns a transform as steps, of which there are none if the mesh axis has one rank.

    Raises:
        _LeftToTorch: for a transform that is none of those below.
    """
    mesh = getattr(transform, "mesh", mesh)  # that of merged axes, where they are
    dim, count = transform.mesh_dim, mesh.size(transform.mesh_dim)
    src, dst = transform.src_dst_placements
    if isinstance(src, MultiAxisShard):
        return [src.step]
    if count == 1:
        return []
    steps: list[Step]
    match _kind(src), _kind(dst):
        case "partial", "shard":
            reduce_op = src.reduce_op.lower()
            steps = [ReduceScatter(_axis(mesh, dim), dim=dst.dim, reduce_op=reduce_op)]
        case "shard", "shard":
            steps = [
                AllToAll(
                    _axis(mesh, dim),
                    from_dim=src.dim,
                    to_dim=dst.dim,
                    from_size=transform.logical_shape[src.dim],
                    to_size=transform.logical_shape[dst.dim],
                    by_gather=_compat.all_to_all_gathers(mesh),
                )
            ]
        case (("shard" | "strided" | "partial"), "partial"):
            raise _LeftToTorch
        case _:
            steps = _to_replicate(transform, mesh) + _from_replicate(transform, mesh)
    if (scale := getattr(transform, "avg_scale", None)) is not None:
        steps.append(Divide(scale))
    return steps


def _to_replicate(transform: Any, mesh: DeviceMesh) -> list[Step]:
    dim, src = transform.mesh_dim, transform.src_dst_placements[0]
    match _kind(src):
        case "replicate":
            return []
        case "partial":
            return [AllReduce(_axis(mesh, dim), reduce_op=src.reduce_op.lower())]
        case "shard":
            size = transform.logical_shape[src.dim]
            return [AllGather(_axis(mesh, dim), dim=src.dim, size=size)]
        case "strided":
            size, parts = transform.logical_shape[src.dim], _parts(transform, mesh, src)
            return [StridedGather(_axis(mesh, dim), dim=src.dim, size=size, split_factor=parts)]
    raise _LeftToTorch


def _from_replicate(transform: Any, mesh: DeviceMesh) -> list[Step]:
    dim, dst = transform.mesh_dim, transform.src_dst_placements[1]
    match _kind(dst):
        case "replicate":
            return []
        case "shard":
            return [Chunk(_axis(mesh, dim), dim=dst.dim)]
        case "strided":
            parts = _parts(transform, mesh, dst)
            return [StridedChunk(_axis(mesh, dim), dim=dst.dim, split_factor=parts)]
        case "partial" if dst.reduce_op == "sum":
            return [Divide(mesh.size(dim))]
        case "partial" if dst.reduce_op in _IDEMPOTENT:
            return []
    raise _LeftToTorch


def _parts(transform: Any, mesh: DeviceMesh, placement: Any) -> int:
    """Returns the split factor of a strided shard whose parts are all equal.

    Raises:
        _LeftToTorch: they are not, or another mesh axis may shard the same dim: torch then works
            with sizes that other ranks' shards need not have.
    """
    parts, count = placement.split_factor, mesh.size(transform.mesh_dim)
    if type(parts) is not int or mesh.ndim > 1:
        raise _LeftToTorch
    if transform.logical_shape[placement.dim] % (parts * count) != 0:
        raise _LeftToTorch
    return parts


def _kind(placement: Placement) -> str:
    return _KINDS[type(placement)]


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Axis(group=mesh.get_group(dim).group_name, size=mesh.size(dim), rank=coordinate[dim])
