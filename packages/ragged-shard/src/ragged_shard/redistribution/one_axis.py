"""Redistributes one mesh axis from one placement to another; the other axes do not change.

At least one of the two is of this package, called "ragged" below. A rank sends:

    source           target           elements                                operation
    Replicate        ragged           none                                    slice
    ragged           Replicate        its own, to each other rank             all-gather, broadcast
    Partial          ragged           those of all other ranks                reduce-scatter
    Shard or ragged  ragged or Shard  its own that other ranks have after it  all-to-all
"""

from __future__ import annotations

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.stored_boxes import StorageWindow, local_shape_on_axis, stored_boxes
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution.all_to_all import all_to_all, pack, unpack
from ragged_shard.redistribution.collectives import REDUCE_OPS, all_gather, reduce_scatter


def redistribute_axis(
    local: torch.Tensor,
    source: Placement,
    target: Placement,
    base: tuple[int, ...],
    mesh: DeviceMesh,
    axis: int,
) -> torch.Tensor:
    """Redistributes a local tensor from one placement on an axis to another.

    Args:
        local: of the source's local shape.
        source: Replicate, Partial, Shard, or one of this package.
        target: Replicate, Shard, or one of this package.
        base: the shape of the base, the same for all ranks of the axis.
        mesh: of the axis.
        axis: of both placements.

    Returns:
        the new local tensor, which may be an AsyncCollectiveTensor, or a view of the old one if
        nothing is sent.
    """
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    local = local.contiguous()
    shape = local_shape_on_axis(target, base, size, rank)
    if size == 1:
        return local.view(shape)
    if isinstance(source, Partial):
        return _reduced(local, source, target, base, mesh, axis)
    if isinstance(source, Replicate):
        return _sliced(local, target, base, mesh, axis)
    if isinstance(target, Replicate):
        return _gathered(local, source, base, mesh, axis)
    return all_to_all(local, source, target, base, mesh, axis)


def _sliced(
    full: torch.Tensor, target: Placement, base: tuple[int, ...], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    pieces = pack(full, _in_base(target, base, size, rank))
    return unpack(
        pieces, _windows(target, base, size, rank), local_shape_on_axis(target, base, size, rank)
    )


def _gathered(
    local: torch.Tensor, source: Placement, base: tuple[int, ...], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    piece = pack(local, _windows(source, base, size, rank))
    gathered = all_gather(piece, _sizes(source, base, size), mesh, axis)
    return unpack(gathered, _all_in_base(source, base, size), base)


def _reduced(
    local: torch.Tensor,
    source: Partial,
    target: Placement,
    base: tuple[int, ...],
    mesh: DeviceMesh,
    axis: int,
) -> torch.Tensor:
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    shape = local_shape_on_axis(target, base, size, rank)
    if type(source) is not Partial or source.reduce_op not in REDUCE_OPS:
        # A subclass of Partial that defines its own reduction (norms, masks).
        full = source._reduce_value(local, mesh, axis)
        return _sliced(full, target, base, mesh, axis)
    pieces = pack(local, _all_in_base(target, base, size))
    piece = reduce_scatter(pieces, _sizes(target, base, size), source.reduce_op, mesh, axis)
    return unpack(piece, _windows(target, base, size, rank), shape)


def _windows(
    placement: Placement, base: tuple[int, ...], size: int, rank: int
) -> tuple[StorageWindow, ...]:
    """Returns the windows of a rank's boxes in its local tensor."""
    return tuple(piece.window for piece in stored_boxes(placement, base, size, rank))


def _in_base(
    placement: Placement, base: tuple[int, ...], size: int, rank: int
) -> tuple[StorageWindow, ...]:
    """Returns the windows of a rank's boxes in a contiguous base."""
    return tuple(
        full.window_of(stored.box)
        for full in stored_boxes(Replicate(), base, size, rank)
        for stored in stored_boxes(placement, base, size, rank)
    )


def _all_in_base(
    placement: Placement, base: tuple[int, ...], size: int
) -> tuple[StorageWindow, ...]:
    return tuple(window for rank in range(size) for window in _in_base(placement, base, size, rank))


def _sizes(placement: Placement, base: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(
        sum(piece.window.numel for piece in stored_boxes(placement, base, size, rank))
        for rank in range(size)
    )


def scatter(
    tensor: torch.Tensor,
    target: Placement,
    mesh: DeviceMesh,
    axis: int,
    source_rank: int | None,
) -> torch.Tensor:
    """Scatters a tensor of one rank over an axis; returns this rank's local tensor.

    Args:
        tensor: the full tensor; on ranks other than the source only its shape and dtype are used.
        target: a placement of this package.
        mesh: of the axis.
        axis: over which to scatter.
        source_rank: its index on the axis; None if every rank slices its own tensor.

    Returns:
        a tensor with its own memory.
    """
    base, size = tuple(tensor.shape), mesh.size(axis)
    if source_rank is None or size == 1 or tensor.is_meta:
        return redistribute_axis(tensor, Replicate(), target, base, mesh, axis).clone()
    owned = RaggedShard.owned_by(source_rank, size)
    is_source = mesh.get_local_rank(axis) == source_rank
    local = tensor.contiguous() if is_source else tensor.new_empty((0, *base[1:]))
    received = all_to_all(local, owned, target, base, mesh, axis)
    if isinstance(received, AsyncCollectiveTensor):
        received = received.wait()
    return received.clone() if is_source and received.data_ptr() == tensor.data_ptr() else received
