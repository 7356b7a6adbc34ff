"""Patch points for a DTensor's local shape and offset, and its hash in torch.compile's cache.

A ragged shard of rows, ``dims=(0,)``, is a box, and so is an owned tensor, ``dims=()``. A range of
elements and interleaved chunks are several boxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard.geometry.specs import Placements, any_custom, is_custom
from ragged_shard.geometry.stored_boxes import normalized
from ragged_shard.geometry.validation import check_fit
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ragged import RaggedShard


def local_shape_and_global_offset(
    native: Callable[..., Any],
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Any,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> Any:
    """Replaces `torch.distributed.tensor._utils._compute_local_shape_and_global_offset`.

    Args:
        native: torch's function.
        global_shape: of the tensor.
        mesh_shape: size of each axis.
        my_coordinate: one index per axis, or a function from an axis to the index.
        placements: one per axis.
        skip_offset: whether to return ``()`` for the offset, which all placements support.

    Returns:
        the shape of the local tensor, and the offset of its first element in the global tensor; for
        an empty ragged shard, of the row where it would begin.

    Raises:
        ValueError: the placements do not fit, or the local tensor is not one box.
    """
    if not any_custom(placements):
        return native(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
    shape, sizes = tuple(global_shape), tuple(mesh_shape)
    at = my_coordinate if callable(my_coordinate) else my_coordinate.__getitem__
    placements = tuple(normalized(placement, len(shape)) for placement in placements)
    check_fit(shape, sizes, placements)
    if not skip_offset and not _is_one_box(shape, placements):
        raise ValueError(
            f"compute_local_shape_and_global_offset: expected placements with one box of the "
            f"tensor on each rank, got {placements} of shape {shape}, which may have several; "
            f"use DTensor.__create_chunk_list__() for the boxes, or skip_offset=True for the local "
            f"shape"
        )
    native_placements = tuple(_native_placement(placement) for placement in placements)
    local, offset = native(shape, sizes, my_coordinate, native_placements, skip_offset)
    for axis, placement in enumerate(placements):
        if isinstance(placement, InterleavedShard) and placement.interleaves > 1:
            local = placement.local_shape(local, sizes[axis], at(axis))
    for axis, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):  # at most one, applied last
            if not skip_offset:
                offset = (offset[0] + placement.first_row(local, at(axis)), *offset[1:])
            local = placement.local_shape(local, at(axis))
    return local, offset


def _native_placement(placement: Placement) -> Placement:
    """Returns torch's placement for the base of a ragged one, or without interleaving."""
    if isinstance(placement, InterleavedShard) and placement.interleaves == 1:
        return Shard(placement.dim)
    return Replicate() if is_custom(placement) else placement


def _is_one_box(shape: tuple[int, ...], placements: Placements) -> bool:
    """Whether every rank's local tensor is one box: the same decision on all ranks."""
    for placement in placements:
        if isinstance(placement, RaggedShard) and (len(placement.dims) > 1 or not shape):
            return False
        if isinstance(placement, InterleavedShard) and placement.interleaves > 1:
            return False
        if isinstance(placement, _StridedShard):
            return False
    return True


def stable_hash(native: Callable[[DTensor], str], tensor: DTensor) -> str:
    """Replaces `DTensor._stable_hash_for_caching` (2.12 and later); adds local shape and strides.

    torch.compile's cache uses one entry for tensors with the same hash. With ragged shards their
    local shapes may differ, with which a warm cache fails. (Torch's uneven Shard has this bug too,
    which is not fixed here.)
    """
    digest = native(tensor)
    if not any_custom(tensor._spec.placements):
        return digest
    local = tensor._local_tensor
    text = f"{digest} {tuple(local.shape)} {local.stride()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
