"""Distributed checkpoints: a shard is saved and loaded as the boxes that it consists of.

DCP knows a tensor as boxes, each with its offset. A ragged shard is a run of storage, a few boxes
(partial rows at its ends, whole rows between); an interleaved shard is a box per chunk. Every box
is saved from, and loaded into, a view of the local tensor, so a sharded checkpoint communicates no
tensor data, and may be read under any other placement.
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
    """A box of the global tensor, and the window of the local tensor that holds it."""

    box: TensorBox
    window: StorageWindow


def checkpoint_boxes(spec: DTensorSpec) -> tuple[CheckpointBox, ...]:
    """Finds the boxes that this rank holds under placements of this package, in local order.

    Args:
        spec: with a shape; of a mesh that this rank is part of.

    Returns:
        Nothing for an empty shard, but an empty box where the whole tensor is empty, so that it is
        in the checkpoint at all.
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
    return _pieces(shape, tuple(spec.mesh.shape), tuple(coordinate), tuple(spec.placements))


@lru_cache(maxsize=4096)
def _pieces(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[CheckpointBox, ...]:
    axis = ragged_axis(placements)
    on_top: Placement = Replicate() if axis is None else placements[axis]
    below = placements if axis is None else replace_axis(placements, axis, Replicate())
    base = local_shape_at(shape, mesh_shape, coordinate, below)
    size, rank = (1, 0) if axis is None else (mesh_shape[axis], coordinate[axis])
    return tuple(
        CheckpointBox(common.shift(part.to_global), piece.window_of(common))
        for part in _base_parts(shape, mesh_shape, coordinate, below)
        for piece in stored_boxes(on_top, base, size, rank)
        if (common := piece.box.intersect(part.box)) is not None
    )


@dataclass(frozen=True, slots=True)
class _BaseBox:
    """A box of the base, in its own coordinates, and the way from there to the global tensor's."""

    box: TensorBox
    to_global: tuple[int, ...]


def _base_parts(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[_BaseBox, ...]:
    """The base of a tensor: one box, or one per interleaved chunk."""
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
    """A rank's part of one chunk of an interleaved dim."""
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
    """`DTensor.__create_write_items__`: one item per box."""
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
    """`DTensor.__create_chunk_list__`: one chunk per box."""
    if not any_custom(tensor._spec.placements):
        return native(tensor)
    tensor._raise_if_contains_partial_placements()
    return [_chunk(piece.box) for piece in checkpoint_boxes(tensor._spec)]


def get_tensor_shard(
    native: Callable[..., torch.Tensor], tensor: DTensor, index: MetadataIndex
) -> torch.Tensor:
    """`DTensor.__get_tensor_shard__`: a view of the local tensor, for reading and for writing.

    Raises:
        ValueError: this rank holds no box at that offset.
    """
    spec = tensor._spec
    if not any_custom(spec.placements):
        return native(tensor, index)
    tensor._raise_if_contains_partial_placements()
    pieces = checkpoint_boxes(spec)
    for piece in pieces:
        if index.offset is not None and tuple(index.offset) == piece.box.offsets:
            window = piece.window
            flat = tensor._local_tensor.detach().view(-1)
            start = flat.storage_offset() + window.offset
            return flat.as_strided(window.sizes, window.strides, start)
    raise ValueError(
        f"{index.fqn}: this rank holds no box at offset {index.offset}; placements "
        f"{spec.placements} give it those at {[piece.box.offsets for piece in pieces]}"
    )


def distribute_tensors(
    native: Callable[..., None],
    local_state_dict: dict[str, Any],
    keys: list[str],
    *args: object,
    **kwargs: object,
) -> None:
    """`_state_dict_utils._distribute_tensors`, for state dicts broadcast from rank 0."""
    others = []
    for key in keys:
        state = local_state_dict.get(key)
        if state is None or torch.is_tensor(state) or not any_custom(state[0].placements):
            others.append(key)
            continue
        [local_state, full_tensor, *_] = state
        cut = distribute_tensor(
            full_tensor.contiguous(),
            local_state.device_mesh,
            local_state.placements,
            src_data_rank=None,  # every rank has the whole by now
        )
        if local_state.is_meta:
            local_state_dict[key] = cut
        else:
            local_state.to_local().copy_(cut.to_local())
            local_state_dict[key] = local_state
    native(local_state_dict, others, *args, **kwargs)


def _chunk(box: TensorBox) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
