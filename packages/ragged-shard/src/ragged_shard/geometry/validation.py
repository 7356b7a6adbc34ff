"""Checks that placements fit a tensor on a mesh, with one result on all ranks, before sending.

The units of a ragged placement divide its base, and bases differ between ranks if an inner axis
shards unevenly. So the bases of all ranks are checked: if one rank raises, all do, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.geometry.specs import (
    Placements,
    dim_of,
    local_shape_at,
    ragged_axis,
    tensor_meta_of,
)
from ragged_shard.geometry.stored_boxes import local_lengths, replicates
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard
from ragged_shard.strided import StridedRaggedShard


def check_placements(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> None:
    """Checks that placements of this package fit a tensor on a mesh.

    Args:
        shape: of the global tensor.
        mesh: of any number of axes.
        placements: one per axis, dims made positive.

    Raises:
        ValueError: the rank is not in the mesh, or as `check_fit`.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{_described(placements)}: expected a rank of the mesh {mesh.mesh.tolist()}, got one "
            f"outside of it; call this on the mesh's ranks only"
        )
    check_fit(tuple(shape), tuple(mesh.shape), tuple(placements))


def check_contiguous(shape: Sequence[int], stride: Sequence[int], placements: Placements) -> None:
    """Checks that a tensor that is to be placed raggedly is contiguous.

    Redistribution does not check it, as it uses the row-major order of elements for any strides.

    Raises:
        ValueError: a placement is ragged, and the strides are not a contiguous tensor's.
    """
    axis = ragged_axis(placements)
    if axis is not None and _is_strided(tuple(shape), tuple(stride)):
        raise ValueError(
            f"{placements[axis]!r}: expected a contiguous tensor, as ragged units are ranges of "
            f"storage, got shape {tuple(shape)} with strides {tuple(stride)}; call .contiguous() "
            f"first"
        )


def check_local(operator: object, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Checks the shape of the local tensor of a ragged DTensor.

    A DTensor that was constructed directly may have another, such as a flat tensor of its elements.
    Not to be called while torch traces, as sizes may be symbols.

    Args:
        operator: named in the error.
        local: the local tensor.
        spec: of the DTensor, with any placements.

    Raises:
        ValueError: the shape is not the placement's, which the message gives.
    """
    if ragged_axis(spec.placements) is None:
        return
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the mesh has no elements
        return
    shape = tensor_meta_of(spec).shape
    expected = _expected_local(shape, _shape_of(spec.mesh), tuple(coordinate), spec.placements)
    if local.shape == expected:
        return
    remedy = "construct the DTensor by distribute_tensor or DTensor.from_local, which check it"
    if local.numel() == math.prod(expected):
        remedy = f"call .view{expected} on it before DTensor(...)"
    raise ValueError(
        f"{operator}: expected a local tensor of shape {expected} on this rank, for placements "
        f"{spec.placements} of a tensor of shape {tuple(shape)}, got {tuple(local.shape)}; {remedy}"
    )


@lru_cache(maxsize=4096)
def _expected_local(
    shape: torch.Size,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[int, ...]:
    return local_shape_at(tuple(shape), mesh_shape, coordinate, tuple(placements))


# A mesh computes its shape at each call, which takes longer than the rest of the check.
_shapes: WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = WeakKeyDictionary()


def _shape_of(mesh: DeviceMesh) -> tuple[int, ...]:
    if (shape := _shapes.get(mesh)) is None:
        shape = _shapes[mesh] = tuple(mesh.shape)
    return shape


@lru_cache(maxsize=4096)
def check_fit(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Placements) -> None:
    """Checks that placements fit a tensor on a mesh, which need not exist.

    Args:
        shape: of the global tensor.
        mesh_shape: size of each axis.
        placements: one per axis, dims made positive.

    Raises:
        ValueError: there is not one placement per axis; a placement is unknown; a dim does not
            exist; a dim is interleaved on two axes; two axes are ragged; units do not divide a
            rank's base; a split factor is not the mesh's.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"{_described(placements)}: expected one for each of the {len(mesh_shape)} axes of "
            f"mesh {mesh_shape}, got {len(placements)}"
        )
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(ragged) > 1:
        raise ValueError(
            f"{_described(placements)}: expected at most one ragged axis, got {ragged}; flatten "
            f"the axes into one, mesh[...]._flatten()"
        )
    for axis in range(len(placements)):
        _check_dim(shape, placements, axis)
    for axis in ragged:
        placement = placements[axis]
        assert isinstance(placement, RaggedShard)
        _check_split_factor(mesh_shape, placements, axis)
        for base in sorted(_bases(shape, mesh_shape, placements)):
            placement.check(base, mesh_shape[axis])


def _check_dim(shape: tuple[int, ...], placements: Placements, axis: int) -> None:
    placement, dim = placements[axis], dim_of(placements[axis])
    where = f"{placement!r} on axis {axis} of {_described(placements)}"
    if dim is None:
        if not (isinstance(placement, RaggedShard) or replicates(placement)):
            raise ValueError(
                f"{where}: expected a placement of torch or ragged_shard, got an unknown one"
            )
        return
    if not 0 <= dim < len(shape):
        raise ValueError(
            f"{where}: expected a dim of the tensor, whose shape is {shape}, got {dim}"
        )
    if isinstance(placement, InterleavedShard):
        placement.check(shape)
        others = (*placements[:axis], *placements[axis + 1 :])
        if any(dim_of(other) == dim for other in others):
            raise ValueError(
                f"{where}: expected an interleaved dim that no other axis shards, got dim {dim}, "
                f"which another axis shards too"
            )


def _check_split_factor(mesh_shape: tuple[int, ...], placements: Placements, axis: int) -> None:
    placement = placements[axis]
    inner = zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
    shards = math.prod(size for size, other in inner if dim_of(other) == 0)
    if isinstance(placement, StridedRaggedShard) and placement.split_factor != shards:
        raise ValueError(
            f"{placement!r} on axis {axis} of {_described(placements)}: expected split_factor="
            f"{shards}, the number of shards of dim 0 on the axes after it, got "
            f"{placement.split_factor}"
        )


def _bases(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Placements
) -> set[tuple[int, ...]]:
    """Returns the shapes of all ranks' bases, of which few differ."""
    bases = {shape}
    for size, placement in zip(mesh_shape, placements, strict=True):
        dim = dim_of(placement)
        if dim is not None:
            bases = {
                (*base[:dim], length, *base[dim + 1 :])
                for base in bases
                for length in local_lengths(placement, base[dim], size)
            }
    return bases


def _is_strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return 0 not in shape and any(
        actual != expected and size > 1
        for size, actual, expected in zip(shape, stride, contiguous_strides(shape), strict=True)
    )


def _described(placements: Sequence[object]) -> str:
    return f"placements [{', '.join(map(repr, placements))}]"
