"""Redistributes one mesh axis from one placement to another, while the other axes stay.

At least one of the two is of this package, called "ragged" below. What each pair costs, in elements
that a rank sends:

    Replicate -> ragged        nothing: every rank slices its pieces
    ragged -> Replicate        its own pieces to each of the others (all-gather, or a broadcast)
    Partial -> ragged          the pieces of all other ranks (reduce-scatter)
    Shard or ragged -> ragged  what it has and others need (all-to-all), both ways
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
    """Moves a local tensor from one placement of an axis to another.

    Args:
        local: of the source's local shape.
        source: Replicate, Partial, Shard, or one of this package.
        target: Replicate, Shard, or one of this package.
        base: shape of the base of the axis, the same for all ranks of the axis.
        mesh: that holds the axis.
        axis: on which both placements are.

    Returns:
        The new local tensor, perhaps not yet received (an AsyncCollectiveTensor); it may be a view
        of the old one where nothing moved.
    """
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    local = local.contiguous()
    shape = local_shape_on_axis(target, base, size, rank)
    if size == 1:
        return local.view(shape)
    if isinstance(source, Partial):
        return _reduced(local, source, target, base, mesh, axis)
    if isinstance(source, Replicate):
        return _cut(local, target, base, mesh, axis)
    if isinstance(target, Replicate):
        return _gathered(local, source, base, mesh, axis)
    return all_to_all(local, source, target, base, mesh, axis)


def _cut(
    whole: torch.Tensor, target: Placement, base: tuple[int, ...], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    pieces = pack(whole, _in_base(target, base, size, rank))
    return unpack(
        pieces, _windows(target, base, size, rank), local_shape_on_axis(target, base, size, rank)
    )


def _gathered(
    local: torch.Tensor, source: Placement, base: tuple[int, ...], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    mine = pack(local, _windows(source, base, size, rank))
    everything = all_gather(mine, _sizes(source, base, size), mesh, axis)
    return unpack(everything, _all_in_base(source, base, size), base)


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
        whole = source._reduce_value(local, mesh, axis)
        return _cut(whole, target, base, mesh, axis)
    pieces = pack(local, _all_in_base(target, base, size))
    mine = reduce_scatter(pieces, _sizes(target, base, size), source.reduce_op, mesh, axis)
    return unpack(mine, _windows(target, base, size, rank), shape)


def _windows(
    placement: Placement, base: tuple[int, ...], size: int, rank: int
) -> tuple[StorageWindow, ...]:
    """The windows of a rank's pieces in its local tensor."""
    return tuple(piece.window for piece in stored_boxes(placement, base, size, rank))


def _in_base(
    placement: Placement, base: tuple[int, ...], size: int, rank: int
) -> tuple[StorageWindow, ...]:
    """The windows of a rank's pieces in a contiguous base."""
    return tuple(
        whole.window_of(piece.box)
        for whole in stored_boxes(Replicate(), base, size, rank)
        for piece in stored_boxes(placement, base, size, rank)
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
    """This rank's pieces of a tensor that one rank of the axis has.

    Args:
        tensor: the whole; on other ranks than the source's its shape and dtype matter only.
        target: one of this package.
        mesh: that holds the axis.
        axis: over which to scatter.
        source_rank: index on the axis, or None: every rank cuts its own tensor.

    Returns:
        A tensor of its own memory.
    """
    base, size = tuple(tensor.shape), mesh.size(axis)
    if source_rank is None or size == 1 or tensor.is_meta:
        return redistribute_axis(tensor, Replicate(), target, base, mesh, axis).clone()
    owned = RaggedShard.owned_by(source_rank, size)
    mine = mesh.get_local_rank(axis) == source_rank
    local = tensor.contiguous() if mine else tensor.new_empty((0, *base[1:]))
    received = all_to_all(local, owned, target, base, mesh, axis)
    if isinstance(received, AsyncCollectiveTensor):
        received = received.wait()
    return received.clone() if mine and received.data_ptr() == tensor.data_ptr() else received
