"""Functions of a spec's placements: which are this package's, the sharded dims, local shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard import _compat
from ragged_shard.geometry.stored_boxes import local_lengths
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard

Placements = tuple[Placement, ...]


def is_custom(placement: Placement) -> TypeGuard[RaggedShard | InterleavedShard]:
    """Whether this is a placement of this package."""
    return isinstance(placement, RaggedShard | InterleavedShard)


def any_custom(placements: Sequence[Placement]) -> bool:
    """Whether any is a placement of this package."""
    for placement in placements:  # noqa: SIM110 - called by every redistribution
        if isinstance(placement, RaggedShard | InterleavedShard):
            return True
    return False


def ragged_axis(placements: Sequence[Placement]) -> int | None:
    """Returns the mesh axis with a ragged placement, or None."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return axis
    return None


def replace_axis(placements: Sequence[Placement], axis: int, placement: Placement) -> Placements:
    """Returns the placements with another one on an axis."""
    return (*placements[:axis], placement, *placements[axis + 1 :])


def with_placements(
    spec: DTensorSpec, placements: Placements, tensor_meta: TensorMeta | None = None
) -> DTensorSpec:
    """Makes a spec with other placements on the same mesh, by default of the same tensor."""
    return _compat.make_spec(spec, placements, tensor_meta or tensor_meta_of(spec))


def tensor_meta_of(spec: DTensorSpec) -> TensorMeta:
    """Returns the shape, stride and dtype of a spec, which all specs here have."""
    assert spec.tensor_meta is not None, f"{spec} has no tensor_meta"
    return spec.tensor_meta


def local_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> tuple[int, ...]:
    """Returns the shape of this rank's local tensor, for any placements.

    Args:
        shape: of the global tensor.
        mesh: of any number of axes; a rank that is not part of it has ``(0,)``, as in torch.
        placements: one per axis.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return (0,)
    return local_shape_at(tuple(shape), tuple(mesh.shape), tuple(coordinate), placements)


def local_shape_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[int, ...]:
    """Returns the shape of the local tensor at a coordinate of a mesh, which need not exist.

    A cache with these arguments as its key does not reference a mesh or its process groups.

    Args:
        shape: of the global tensor.
        mesh_shape: size of each axis.
        coordinate: index on each axis.
        placements: one per axis.
    """
    axis = ragged_axis(placements)
    if axis is not None:
        ragged = placements[axis]
        assert isinstance(ragged, RaggedShard)
        others = replace_axis(placements, axis, Replicate())
        return ragged.local_shape(
            local_shape_at(shape, mesh_shape, coordinate, others), coordinate[axis]
        )
    native = tuple(Replicate() if is_custom(p) else p for p in placements)
    result = _compat.native_local_shape(shape, mesh_shape, coordinate, native)
    for axis, placement in enumerate(placements):
        if isinstance(placement, InterleavedShard):
            result = placement.local_shape(result, mesh_shape[axis], coordinate[axis])
    return result


def even_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...] | None:
    """Returns the shape of the local tensor of every rank; None if it differs between ranks.

    All ranks compute the same result without a process group, so they can plan by it.

    Args:
        shape: of the global tensor, which the placements fit.
        mesh_shape: size of each axis.
        placements: one per axis, of torch or this package, none of them ragged.

    Raises:
        ValueError: a placement is ragged, whose units depend on the other axes.
    """
    _refuse_ragged("even_shape", placements)
    sizes = list(shape)
    for axis_size, placement in zip(mesh_shape, placements, strict=True):
        dim = dim_of(placement)
        if dim is not None:
            lengths = local_lengths(placement, sizes[dim], axis_size)
            if len(lengths) > 1:
                return None
            sizes[dim] = lengths.pop()
    return tuple(sizes)


def largest_shape(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> tuple[int, ...]:
    """Returns the largest size of each dim of the ranks' local tensors: those of the first rank.

    All ranks compute the same result without a process group, so they can plan by it.

    Args:
        shape: of the global tensor, which the placements fit.
        mesh_shape: size of each axis.
        placements: one per axis, of torch or this package, none of them ragged.

    Raises:
        ValueError: a placement is ragged, whose units depend on the other axes.
    """
    _refuse_ragged("largest_shape", placements)
    first = (0,) * len(mesh_shape)  # `torch.chunk` makes the last chunks short
    return local_shape_at(tuple(shape), tuple(mesh_shape), first, tuple(placements))


def _refuse_ragged(name: str, placements: Sequence[Placement]) -> None:
    for placement in placements:
        if isinstance(placement, RaggedShard):
            raise ValueError(
                f"{name}: expected placements that are not ragged, got {placement!r} among "
                f"{tuple(placements)}; pass Replicate in its place"
            )


def base_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Placements, axis: int
) -> tuple[int, ...]:
    """Returns the shape of this rank's local tensor if the axis replicated."""
    return local_shape(shape, mesh, replace_axis(placements, axis, Replicate()))


def shards_any_dim(placements: Sequence[Placement]) -> bool:
    """Whether one of these placements shards a dim."""
    return any(dim_of(placement) is not None for placement in placements)


def dim_of(placement: Placement) -> int | None:
    """Returns the dim that a placement shards; None for a ragged or replicating one."""
    if isinstance(placement, Shard | _StridedShard | InterleavedShard):
        return placement.dim
    return None
