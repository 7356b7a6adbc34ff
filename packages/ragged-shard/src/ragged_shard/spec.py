"""Questions about the placements of a spec: which are ours, do they fit, what shape is local."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeGuard

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard import _compat
from ragged_shard.boxes import contiguous_strides
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.strided import StridedRaggedShard

Placements = tuple[Placement, ...]


def is_ours(placement: Placement) -> TypeGuard[RaggedShard | InterleavedShard]:
    """Whether stock torch does not know this placement."""
    return isinstance(placement, RaggedShard | InterleavedShard)


def any_ours(placements: Sequence[Placement]) -> bool:
    """Whether stock torch does not know one of these placements."""
    for placement in placements:  # noqa: SIM110 - on the path of every stock redistribution
        if isinstance(placement, RaggedShard | InterleavedShard):
            return True
    return False


def ragged_axis(placements: Sequence[Placement]) -> int | None:
    """The mesh axis with a ragged placement, or None."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return axis
    return None


def put(placements: Sequence[Placement], axis: int, placement: Placement) -> Placements:
    """The placements with another one on an axis."""
    return (*placements[:axis], placement, *placements[axis + 1 :])


def with_placements(
    spec: DTensorSpec, placements: Placements, tensor_meta: TensorMeta | None = None
) -> DTensorSpec:
    """A spec on the same mesh, of the same tensor unless another meta is given."""
    return _compat.make_spec(spec, placements, tensor_meta or meta_of(spec))


def meta_of(spec: DTensorSpec) -> TensorMeta:
    """The shape, stride and dtype of a spec, which every spec that reaches us has."""
    assert spec.tensor_meta is not None, f"{spec} has no tensor_meta"
    return spec.tensor_meta


def local_shape(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> tuple[int, ...]:
    """The shape of this rank's local tensor, for any placements.

    Args:
        shape: of the global tensor.
        mesh: that this rank is part of.
        placements: one per axis.
    """
    axis = ragged_axis(placements)
    if axis is not None:
        ragged = placements[axis]
        assert isinstance(ragged, RaggedShard)
        base = local_shape(shape, mesh, put(placements, axis, Replicate()))
        return ragged.local_shape(base, mesh.get_local_rank(axis))
    stock = tuple(Replicate() if is_ours(p) else p for p in placements)
    result = _compat.stock_local_shape(tuple(shape), mesh, stock)
    for axis, placement in enumerate(placements):
        if isinstance(placement, InterleavedShard):
            result = placement.local_shape(result, mesh.size(axis), mesh.get_local_rank(axis))
    return result


def base_shape(
    shape: Sequence[int], mesh: DeviceMesh, placements: Placements, axis: int
) -> tuple[int, ...]:
    """The shape of what this rank would hold if the axis replicated."""
    return local_shape(shape, mesh, put(placements, axis, Replicate()))


def check_placements(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> None:
    """Raises where placements of ours do not fit a tensor on a mesh, before anything is sent.

    Args:
        shape: of the global tensor.
        mesh: of any number of axes.
        placements: one per axis, dims made positive.

    Raises:
        ValueError: the rank is not in the mesh; more than one ragged axis; what the placements' own
            checks refuse; a split factor that is not the mesh's.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(
            f"{_described(placements)}: this rank is not in the mesh {mesh.mesh.tolist()}; only "
            f"its ranks may place tensors on it"
        )
    _check(tuple(shape), mesh, tuple(coordinate), tuple(placements))


def check_contiguous(shape: Sequence[int], stride: Sequence[int], placements: Placements) -> None:
    """Raises where a tensor that is to be placed is not the run of storage that ragged units cut.

    Redistribution does not ask: it goes by the elements' row-major order, whatever the strides.

    Raises:
        ValueError: a ragged placement and other strides than a contiguous tensor's.
    """
    axis = ragged_axis(placements)
    if axis is not None and _is_strided(tuple(shape), tuple(stride)):
        raise ValueError(
            f"{placements[axis]!r}: the tensor of shape {tuple(shape)} has strides "
            f"{tuple(stride)}; ragged units are runs of storage, so it must be contiguous: call "
            f".contiguous() first"
        )


@lru_cache(maxsize=4096)
def _check(
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    coordinate: tuple[int, ...],  # equal meshes may be of different ranks, with other bases
    placements: Placements,
) -> None:
    del coordinate
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{_described(placements)}: {len(placements)} placements for a mesh of {mesh.ndim} axes"
        )
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(ragged) > 1:
        raise ValueError(
            f"{_described(placements)}: axes {ragged} are both ragged; a tensor has at most one "
            f"ragged axis (flatten the axes into one, mesh[...]._flatten())"
        )
    _check_interleaved(shape, mesh, placements)
    for axis in ragged:
        placement = placements[axis]
        assert isinstance(placement, RaggedShard)
        placement.check(base_shape(shape, mesh, placements, axis), mesh.size(axis))
        _check_split_factor(mesh, placements, axis)


def _check_interleaved(shape: tuple[int, ...], mesh: DeviceMesh, placements: Placements) -> None:
    for axis, placement in enumerate(placements):
        if not isinstance(placement, InterleavedShard):
            continue
        placement.check(shape)
        for other, neighbour in enumerate(placements):
            if other != axis and getattr(neighbour, "dim", None) == placement.dim:
                raise ValueError(
                    f"{placement!r} on axis {axis}: axis {other} shards dim {placement.dim} too, "
                    f"as {neighbour}; an interleaved dim can be on one axis only"
                )


def _check_split_factor(mesh: DeviceMesh, placements: Placements, axis: int) -> None:
    placement = placements[axis]
    if not isinstance(placement, StridedRaggedShard):
        return
    inner = [
        mesh.size(other)
        for other in range(axis + 1, mesh.ndim)
        if getattr(placements[other], "dim", None) == 0
    ]
    wanted = 1
    for size in inner:
        wanted *= size
    if placement.split_factor != wanted:
        raise ValueError(
            f"{placement!r} on axis {axis} of {_described(placements)}: the axes after it cut dim "
            f"0 into {wanted} pieces, so split_factor must be {wanted}"
        )


def _is_strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return 0 not in shape and any(
        given != wanted and size > 1
        for size, given, wanted in zip(shape, stride, contiguous_strides(shape), strict=True)
    )


def _described(placements: Sequence[Placement]) -> str:
    return f"placements [{', '.join(map(repr, placements))}]"


def shards_dim(placement: Placement, dim: int) -> bool:
    """Whether a placement, stock or ours, cuts a dim on its own."""
    return isinstance(placement, Shard | _StridedShard | InterleavedShard) and placement.dim == dim
