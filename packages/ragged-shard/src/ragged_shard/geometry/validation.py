"""Whether placements fit a tensor on a mesh: one decision for all ranks, before anything is sent.

The units of a ragged placement cut its base, and bases differ between ranks where an inner axis
cuts unevenly. So every base is asked, not this rank's alone: if one raises all do, and none waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard import _compat
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
    """Raises where placements of this package do not fit a tensor on a mesh.

    Args:
        shape: of the global tensor.
        mesh: of any number of axes.
        placements: one per axis, dims made positive.

    Raises:
        ValueError: the rank is not in the mesh; as `check_fit`.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"{_described(placements)}: this rank is not in the mesh {mesh.mesh.tolist()}; only "
            f"its ranks may place tensors on it"
        )
    check_fit(tuple(shape), tuple(mesh.shape), tuple(placements))


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


def check_local(name: str, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Raises where the local tensor of a ragged DTensor has another shape than this package's.

    A DTensor that was constructed directly may have one: a flat tensor of the right elements.
    Nothing is checked while torch traces, where sizes may be symbols.

    Args:
        name: of the operator, for the error.
        local: the local tensor.
        spec: of the DTensor, with any placements.

    Raises:
        ValueError: another shape, with the shape that was expected.
    """
    if ragged_axis(spec.placements) is None or _compat.is_tracing():
        return
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:  # such a rank holds nothing
        return
    shape = tuple(tensor_meta_of(spec).shape)
    expected = _expected_local(
        shape, tuple(spec.mesh.shape), tuple(coordinate), tuple(spec.placements)
    )
    if tuple(local.shape) == expected:
        return
    remedy = "construct it with distribute_tensor or DTensor.from_local, which check it"
    if local.numel() == math.prod(expected):
        remedy = f"call .view{expected} on it before DTensor(...)"
    raise ValueError(
        f"{name}: expected a local tensor of shape {expected} on this rank, for placements "
        f"{spec.placements} of a tensor of shape {shape}, got {tuple(local.shape)}; {remedy}"
    )


_expected_local = lru_cache(maxsize=4096)(local_shape_at)


@lru_cache(maxsize=4096)
def check_fit(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Placements) -> None:
    """Raises where placements do not fit a tensor on a mesh, which need not exist.

    Args:
        shape: of the global tensor.
        mesh_shape: size of each axis.
        placements: one per axis, dims made positive.

    Raises:
        ValueError: not one placement per axis; a placement that is not known here; a dim that does
            not exist; an interleaved dim on two axes; two ragged axes; units that do not divide a
            rank's base; another split factor than the mesh's.
    """
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"{_described(placements)}: {len(placements)} placements for a mesh of "
            f"{len(mesh_shape)} axes {mesh_shape}; give one per axis"
        )
    ragged = [axis for axis, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if len(ragged) > 1:
        raise ValueError(
            f"{_described(placements)}: axes {ragged} are both ragged; a tensor has at most one "
            f"ragged axis (flatten the axes into one, mesh[...]._flatten())"
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
            raise ValueError(f"{where} is no placement that is known here")
        return
    if not 0 <= dim < len(shape):
        raise ValueError(f"{where}: dim {dim} does not exist in a tensor of shape {shape}")
    if isinstance(placement, InterleavedShard):
        placement.check(shape)
        others = (*placements[:axis], *placements[axis + 1 :])
        if any(dim_of(other) == dim for other in others):
            raise ValueError(
                f"{where}: another axis shards dim {dim} too; an interleaved dim can be on one "
                f"axis only"
            )


def _check_split_factor(mesh_shape: tuple[int, ...], placements: Placements, axis: int) -> None:
    placement = placements[axis]
    inner = zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
    pieces = math.prod(size for size, other in inner if dim_of(other) == 0)
    if isinstance(placement, StridedRaggedShard) and placement.split_factor != pieces:
        raise ValueError(
            f"{placement!r} on axis {axis} of {_described(placements)}: the axes after it cut dim "
            f"0 into {pieces} pieces, so split_factor must be {pieces}"
        )


def _bases(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Placements
) -> set[tuple[int, ...]]:
    """The shapes of all ranks' bases; few, for the sizes of shards are."""
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
        given != wanted and size > 1
        for size, given, wanted in zip(shape, stride, contiguous_strides(shape), strict=True)
    )


def _described(placements: Sequence[object]) -> str:
    return f"placements [{', '.join(map(repr, placements))}]"
