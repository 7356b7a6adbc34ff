"""Redistributes between two sharded placements on one axis by one all-to-all.

Only elements that change their rank are sent: a rank sends to another the intersections of its
boxes with the other's new boxes. The plan follows from shapes, and is cached per pair of placements
and rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import _compat
from ragged_shard.geometry.stored_boxes import (
    StorageWindow,
    are_contiguous,
    local_shape_on_axis,
    stored_boxes,
)
from ragged_shard.ragged import RaggedShard


@dataclass(frozen=True, slots=True)
class AllToAllPlan:
    """The plan of an all-to-all on one rank.

    Attributes:
        sent: windows of the local tensor, in the order of the send buffer.
        sent_to: elements for each rank of the axis.
        received: windows of the new local tensor, in the order of the receive buffer.
        received_from: elements from each rank of the axis.
        shape: of the new local tensor.
    """

    sent: tuple[StorageWindow, ...]
    sent_to: tuple[int, ...]
    received: tuple[StorageWindow, ...]
    received_from: tuple[int, ...]
    shape: tuple[int, ...]


@lru_cache(maxsize=4096)
def plan_all_to_all(
    source: Placement, target: Placement, base: tuple[int, ...], axis_size: int, rank: int
) -> AllToAllPlan:
    """Plans what a rank sends and receives between two placements of one base on one axis."""
    mine, wanted = (
        stored_boxes(source, base, axis_size, rank),
        stored_boxes(target, base, axis_size, rank),
    )
    sent, sent_to, received, received_from = [], [], [], []
    for other in range(axis_size):
        # Both sides walk the sender's pieces first, so the buffers agree.
        targets = stored_boxes(target, base, axis_size, other)
        pairs = [(piece, piece.box.intersect(want.box)) for piece in mine for want in targets]
        windows = [piece.window_of(box) for piece, box in pairs if box is not None]
        sent += windows
        sent_to.append(sum(window.numel for window in windows))

        given = stored_boxes(source, base, axis_size, other)
        pairs = [(want, piece.box.intersect(want.box)) for piece in given for want in wanted]
        windows = [want.window_of(box) for want, box in pairs if box is not None]
        received += windows
        received_from.append(sum(window.numel for window in windows))
    return AllToAllPlan(
        tuple(sent),
        tuple(sent_to),
        tuple(received),
        tuple(received_from),
        local_shape_on_axis(target, base, axis_size, rank),
    )


def all_to_all(
    local: torch.Tensor,
    source: Placement,
    target: Placement,
    base: tuple[int, ...],
    mesh: DeviceMesh,
    axis: int,
) -> torch.Tensor:
    """Redistributes a local tensor from one placement on an axis to another.

    Args:
        local: contiguous, of the source's local shape.
        source: Shard, or one of this package.
        target: Shard, or one of this package.
        base: shape of the base of the axis.
        mesh: that holds the axis.
        axis: on which both placements are.

    Returns:
        The new local tensor, perhaps not yet received (an AsyncCollectiveTensor).
    """
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    plan = plan_all_to_all(source, target, base, size, rank)
    if _nothing_moves(source, target, base, size):
        return local.view(plan.shape)
    received = funcol.all_to_all_single(
        pack(local, plan.sent), list(plan.received_from), list(plan.sent_to), (mesh, axis)
    )
    return unpack(received, plan.received, plan.shape)


def pack(local: torch.Tensor, windows: tuple[StorageWindow, ...]) -> torch.Tensor:
    """Copies windows of a contiguous tensor into a flat buffer, concatenated.

    Returns:
        a view of the tensor if the windows cover it in order, else a copy.
    """
    flat = local.view(-1)
    if are_contiguous(windows) and sum(window.numel for window in windows) == flat.numel():
        return flat
    if not windows:
        return flat.new_empty(0)
    return torch.cat([view_of(flat, window).reshape(-1) for window in windows])


def unpack(
    buffer: torch.Tensor, windows: tuple[StorageWindow, ...], shape: tuple[int, ...]
) -> torch.Tensor:
    """Makes a tensor of this shape and fills its windows from a flat buffer: reverses `pack`.

    Returns:
        A view of the buffer where that is the same, which does not wait for the buffer.
    """
    if are_contiguous(windows):
        return buffer.view(shape)
    flat = buffer.new_empty(math.prod(shape))
    parts = buffer.split([window.numel for window in windows])
    for window, part in zip(windows, parts, strict=True):
        values = part.view(window.sizes)
        if _compat.is_tracing():  # torch.compile knows no writes through as_strided
            flat = flat.as_strided_scatter(values, window.sizes, window.strides, window.offset)
        else:
            view_of(flat, window).copy_(values)
    return flat.view(shape)


def view_of(flat: torch.Tensor, window: StorageWindow) -> torch.Tensor:
    """Returns a window of a flat tensor."""
    return flat.as_strided(window.sizes, window.strides, flat.storage_offset() + window.offset)


def _nothing_moves(
    source: Placement, target: Placement, base: tuple[int, ...], axis_size: int
) -> bool:
    """Whether every rank already has its elements, which all of them know without communication."""
    if isinstance(source, RaggedShard) and isinstance(target, RaggedShard):
        return all(
            source.interval(base, rank) == target.interval(base, rank) for rank in range(axis_size)
        )
    return False
