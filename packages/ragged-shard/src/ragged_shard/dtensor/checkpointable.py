"""Converts DTensors of a state dict to plain tensors that DCP saves and loads as shards.

Since torch 2.14 DCP takes a plain tensor with four attributes for shards of a global tensor
(``CheckpointableTensor``, torch/distributed/checkpoint/protocol.py). A box of the global tensor is
a slice of it, so it has as many dims as the global tensor. The local tensor of interleaved chunks
is such a tensor, and that of full rows is a view of one. A ragged shard that begins or ends within
a row is copied into one. Of a shard of ten elements in rows of four, head h, body b and tail t
become slices of a tensor of 4 x 4:

    .  .  .  h
    b  b  b  b
    b  b  b  b
    t  .  .  .
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Replicate

from ragged_shard import _compat
from ragged_shard.dtensor.checkpoint import checkpoint_boxes
from ragged_shard.geometry.boxes import TensorBox, contiguous_strides
from ragged_shard.geometry.specs import (
    Placements,
    any_custom,
    local_shape_at,
    ragged_axis,
    replace_axis,
)
from ragged_shard.ragged import RaggedShard


def to_checkpointable(
    state_dict: Mapping[str, Any], *, partial_rows: Literal["copy", "dtensor"] = "copy"
) -> dict[str, Any]:
    """Replaces DTensors with placements of this package by plain tensors for DCP.

    DCP saves the result, and loads into it, without the methods of DTensor that `install` replaces.
    Checkpoints are the same, and each loads the other way. Before torch 2.14 DCP has no such
    tensors, and DTensors stay as they are, as those with placements of torch always do.

    Plain tensors are in the memory of the local tensors, except for copies of those that begin or
    end within a row. After loading, call `from_checkpointable`.

    Args:
        state_dict: with values in dicts, lists and tuples of any depth; is not changed.
        partial_rows: what becomes of shards that begin or end within a row: ``"copy"`` copies them,
            with less than two rows more; ``"dtensor"`` leaves the DTensor, for no memory.

    Raises:
        ValueError: `partial_rows` is neither of these.

    Examples:
        >>> dcp.save(to_checkpointable(state), checkpoint_id="step-100")
        >>> plain = to_checkpointable(state)
        >>> dcp.load(plain, checkpoint_id="step-100")
        >>> state = from_checkpointable(plain, state)
    """
    if partial_rows not in ("copy", "dtensor"):
        raise ValueError(
            f"to_checkpointable: expected partial_rows='copy' or 'dtensor', got {partial_rows!r}"
        )
    return {key: _convert(value, partial_rows == "copy") for key, value in state_dict.items()}


def from_checkpointable(loaded: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a loaded state dict with the DTensors that `to_checkpointable` has replaced.

    Args:
        loaded: what `to_checkpointable` returned, after DCP has loaded into it.
        state_dict: what `to_checkpointable` got. Its DTensors get the loaded values in place,
            except for those on meta.

    Returns:
        DTensors, and other values of `loaded`.

    Raises:
        ValueError: a value is not what `to_checkpointable` makes of the DTensor.
    """
    return {key: _restore(loaded[key], state_dict.get(key), str(key)) for key in loaded}


def _convert(value: Any, copies: bool) -> Any:
    if isinstance(value, DTensor):
        if not _compat.has_checkpointable_tensors() or not any_custom(value.placements):
            return value
        layout = _layout_of(value)
        return _plain_tensor(value, layout) if copies or not layout.is_copy else value
    if isinstance(value, Mapping):
        return {key: _convert(item, copies) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_convert(item, copies) for item in value)
    return value


def _restore(loaded: Any, original: Any, name: str) -> Any:
    if isinstance(original, DTensor) and not isinstance(loaded, DTensor):
        return _restore_dtensor(loaded, original, name)
    if isinstance(loaded, Mapping) and isinstance(original, Mapping):
        return {key: _restore(loaded[key], original.get(key), f"{name}.{key}") for key in loaded}
    if type(loaded) in (list, tuple) and isinstance(original, list | tuple):
        others = [*original, *(None,) * len(loaded)]  # DCP may have loaded a longer one
        return type(loaded)(
            _restore(item, other, f"{name}.{index}")
            for index, (item, other) in enumerate(zip(loaded, others, strict=False))
        )
    return loaded


@dataclass(frozen=True, slots=True)
class _PlainLayout:
    """The plain tensor of this rank.

    Attributes:
        shape: with as many dims as the global tensor.
        boxes: of the global tensor.
        offsets: of each box in the plain tensor.
        start: index of the local tensor's first element in the flattened plain tensor.
        is_copy: whether the plain tensor has more elements than the local one.
    """

    shape: tuple[int, ...]
    boxes: tuple[TensorBox, ...]
    offsets: tuple[tuple[int, ...], ...]
    start: int
    is_copy: bool


def _layout_of(tensor: DTensor) -> _PlainLayout:
    tensor._raise_if_contains_partial_placements()
    stored = checkpoint_boxes(tensor._spec)
    if 0 in tensor.shape or not stored:
        boxes = tuple(one.box for one in stored)
        shape = tuple(tensor.shape) if boxes else (0,) * max(tensor.ndim, 1)
        return _PlainLayout(shape, boxes, ((0,) * tensor.ndim,) * len(boxes), 0, False)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # it has boxes
    plain = _bounding_rows(
        tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), tensor.placements
    )
    strides = contiguous_strides(plain.shape)
    return _PlainLayout(
        plain.shape,
        tuple(one.box for one in stored),
        tuple(_index(one.window.offset + plain.start, strides) for one in stored),
        plain.start,
        math.prod(plain.shape) != tensor._local_tensor.numel(),
    )


@dataclass(frozen=True, slots=True)
class _BoundingRows:
    """A shape of which a rank's elements are a contiguous range, and the start of the range."""

    shape: tuple[int, ...]
    start: int


@lru_cache(maxsize=4096)
def _bounding_rows(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> _BoundingRows:
    """Returns the smallest rows of the base that contain the local tensor.

    A range within one row is one of the row's own rows, and so on.
    """
    axis = ragged_axis(placements)
    if axis is None:
        return _BoundingRows(local_shape_at(shape, mesh_shape, coordinate, placements), 0)
    ragged = placements[axis]
    assert isinstance(ragged, RaggedShard)
    others = replace_axis(placements, axis, Replicate())
    base = local_shape_at(shape, mesh_shape, coordinate, others)
    run = ragged.interval(base, coordinate[axis])
    first, last = run.start, run.stop - 1
    for dim, stride in enumerate(contiguous_strides(base)):
        rows = last // stride - first // stride + 1
        first, last = first % stride, last % stride
        if rows > 1:
            return _BoundingRows((*(1,) * dim, rows, *base[dim + 1 :]), first)
    return _BoundingRows((1,) * len(base), 0)


def _index(position: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the indices of an element of a flattened tensor."""
    indices = []
    for stride in strides:
        indices.append(position // stride)
        position %= stride
    return tuple(indices)


def _plain_tensor(tensor: DTensor, layout: _PlainLayout) -> torch.Tensor:
    local: Any = tensor._local_tensor.detach()
    if layout.is_copy:
        plain = local.new_empty(layout.shape)
        if not local.is_meta:
            _range_of(plain, layout, local.numel()).copy_(local.view(-1))
    else:
        plain = local.view(layout.shape)
    plain.global_shape = tuple(tensor.shape)
    plain.global_offsets = tuple(box.offsets for box in layout.boxes)
    plain.local_offsets = layout.offsets
    plain.local_sizes = tuple(box.sizes for box in layout.boxes)
    return plain  # type: ignore[no-any-return]


def _restore_dtensor(plain: Any, original: DTensor, name: str) -> DTensor:
    layout, local = _layout_of(original), original._local_tensor
    boxes = tuple(box.offsets for box in layout.boxes)
    if (
        getattr(plain, "global_offsets", None) != boxes
        or plain.local_offsets != layout.offsets
        or tuple(plain.shape) != layout.shape
    ):
        raise ValueError(
            f"from_checkpointable: expected for {name!r} what to_checkpointable makes of a DTensor "
            f"placed as {original.placements}, got {type(plain).__name__} "
            f"{tuple(getattr(plain, 'shape', ()))}; pass the state dict that it was made of"
        )
    values = _range_of(plain, layout, local.numel()).view(local.shape)
    if local.is_meta:
        return DTensor(values, original._spec, requires_grad=False)
    if values.data_ptr() != local.data_ptr():
        local.detach().copy_(values)
    return original


def _range_of(plain: torch.Tensor, layout: _PlainLayout, numel: int) -> torch.Tensor:
    """Returns the elements of the local tensor, flattened; a view if they are contiguous."""
    return plain.reshape(-1)[layout.start : layout.start + numel]
