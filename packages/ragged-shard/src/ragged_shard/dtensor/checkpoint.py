"""Patch points of distributed checkpoints: a shard is saved and loaded as boxes.

DCP stores a tensor as boxes with their offsets. A ragged shard is a range of storage, which is a
few boxes (partial rows at both ends, full rows between); an interleaved shard is a box per chunk.
Every box is saved from, and loaded into, a view of the local tensor, so a sharded checkpoint sends
no tensor data, and may be loaded with any other placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import _compat
from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    is_custom,
    local_shape_at,
    ragged_axis,
    replace_axis,
    tensor_meta_of,
)
from ragged_shard.geometry.stored_boxes import StorageWindow, stored_boxes
from ragged_shard.interleaved import InterleavedShard


@dataclass(frozen=True, slots=True)
class CheckpointBox:
    """A box of the global tensor, and its window of the local tensor."""

    box: TensorBox
    window: StorageWindow


def checkpoint_boxes(spec: DTensorSpec) -> tuple[CheckpointBox, ...]:
    """Finds the boxes of this rank, in the order of its local tensor.

    Args:
        spec: with a shape, and placements of this package.

    Returns:
        the boxes; none for an empty shard, but an empty box for a tensor without elements, so that
        the checkpoint has the tensor.
    """
    shape = tuple(tensor_meta_of(spec).shape)
    if 0 in shape:
        return (
            CheckpointBox(
                TensorBox((0,) * len(shape), shape), StorageWindow(shape, (1,) * len(shape), 0)
            ),
        )
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return ()
    return _boxes(shape, tuple(spec.mesh.shape), tuple(coordinate), tuple(spec.placements))


@lru_cache(maxsize=4096)
def _boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[CheckpointBox, ...]:
    axis = ragged_axis(placements)
    ragged: Placement = Replicate() if axis is None else placements[axis]
    others = placements if axis is None else replace_axis(placements, axis, Replicate())
    base = local_shape_at(shape, mesh_shape, coordinate, others)
    size, rank = (1, 0) if axis is None else (mesh_shape[axis], coordinate[axis])
    return tuple(
        CheckpointBox(common.shift(part.to_global), stored.window_of(common))
        for part in _base_parts(shape, mesh_shape, coordinate, others)
        for stored in stored_boxes(ragged, base, size, rank)
        if (common := stored.box.intersect(part.box)) is not None
    )


@dataclass(frozen=True, slots=True)
class _BaseBox:
    """A box in the base's coordinates, and its shift to those of the global tensor."""

    box: TensorBox
    to_global: tuple[int, ...]


def _base_parts(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[_BaseBox, ...]:
    """Returns the base of a tensor: one box, or one per interleaved chunk."""
    native = tuple(Replicate() if is_custom(placement) else placement for placement in placements)
    sizes = _compat.native_local_shape(shape, mesh_shape, coordinate, native)
    offsets = _compat.native_offsets(shape, mesh_shape, coordinate, native)
    parts: tuple[_BaseBox, ...] = (_BaseBox(TensorBox((0,) * len(shape), sizes), offsets),)
    for axis, placement in enumerate(placements):
        if isinstance(placement, InterleavedShard):
            mine = placement.piece(shape, mesh_shape[axis], coordinate[axis])
            chunk = placement.chunk(shape)
            parts = tuple(
                _slab(part, placement.dim, index, mine, chunk)
                for part in parts
                for index in range(placement.interleaves)
            )
    return parts


def _slab(part: _BaseBox, dim: int, index: int, mine: range, chunk: int) -> _BaseBox:
    """Returns a rank's part of one chunk of an interleaved dim."""
    start, distance = index * len(mine), index * (chunk - len(mine)) + mine.start
    return _BaseBox(
        TensorBox(_with(part.box.offsets, dim, start), _with(part.box.sizes, dim, len(mine))),
        _with(part.to_global, dim, distance),
    )


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def create_write_items(
    native: Callable[..., list[WriteItem]],
    tensor: DTensor,
    fqn: str,
    object: Any,  # noqa: A002 - torch's name, by which callers may pass it
) -> list[WriteItem]:
    """Replaces `DTensor.__create_write_items__`, with one item per box."""
    spec = tensor._spec
    if not any_custom(spec.placements):
        return native(tensor, fqn, object)
    tensor._raise_if_contains_partial_placements()
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, torch.Size(piece.box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(piece.box), properties=properties, size=tensor.size()
            ),
        )
        for piece in checkpoint_boxes(spec)
    ]


def create_chunk_list(
    native: Callable[..., list[ChunkStorageMetadata]], tensor: DTensor
) -> list[ChunkStorageMetadata]:
    """Replaces `DTensor.__create_chunk_list__`, with one chunk per box."""
    if not any_custom(tensor._spec.placements):
        return native(tensor)
    tensor._raise_if_contains_partial_placements()
    return [_chunk(piece.box) for piece in checkpoint_boxes(tensor._spec)]


def get_tensor_shard(
    native: Callable[..., torch.Tensor], tensor: DTensor, index: MetadataIndex
) -> torch.Tensor:
    """Replaces `DTensor.__get_tensor_shard__`; returns a view of the local tensor.

    Raises:
        ValueError: this rank has no box at the offset.
    """
    spec = tensor._spec
    if not any_custom(spec.placements):
        return native(tensor, index)
    tensor._raise_if_contains_partial_placements()
    boxes = checkpoint_boxes(spec)
    for stored in boxes:
        if index.offset is not None and tuple(index.offset) == stored.box.offsets:
            window = stored.window
            flat = tensor._local_tensor.detach().view(-1)
            start = flat.storage_offset() + window.offset
            return flat.as_strided(window.sizes, window.strides, start)
    raise ValueError(
        f"{index.fqn}: expected the offset of a box of this rank, with placements "
        f"{spec.placements} one of {[stored.box.offsets for stored in boxes]}, got {index.offset}"
    )


def distribute_tensors(
    native: Callable[..., None],
    local_state_dict: dict[str, Any],
    keys: list[str],
    *args: object,
    **kwargs: object,
) -> None:
    """Replaces `_state_dict_utils._distribute_tensors`, of state dicts broadcast from rank 0."""
    others = []
    for key in keys:
        state = local_state_dict.get(key)
        if state is None or torch.is_tensor(state) or not any_custom(state[0].placements):
            others.append(key)
            continue
        [local_state, full_tensor, *_] = state
        sharded = distribute_tensor(
            full_tensor.contiguous(),
            local_state.device_mesh,
            local_state.placements,
            src_data_rank=None,  # every rank has the full tensor
        )
        if local_state.is_meta:
            local_state_dict[key] = sharded
        else:
            local_state.to_local().copy_(sharded.to_local())
            local_state_dict[key] = local_state
    native(local_state_dict, others, *args, **kwargs)


def _chunk(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
