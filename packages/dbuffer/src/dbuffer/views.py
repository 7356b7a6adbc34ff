"""Tensors that are views of a buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from ragged_shard import RaggedShard
from ragged_shard.planner import Layout

__all__ = ["contiguous_stride", "ragged_shard", "tensor_in", "tensor_shape"]


def tensor_in(
    memory: torch.Tensor, dtype: torch.dtype, start: int, shape: Sequence[int]
) -> torch.Tensor:
    """Makes a contiguous tensor in given memory.

    It is no view in autograd's sense: it shares the storage and has a version of its own. So a
    gather, which writes through the flat tensor, does not make autograd refuse what it saved of a
    parameter, and a write to the parameter itself still does.

    Args:
        memory: uint8, of one dim.
        dtype: of the tensor.
        start: elements of `dtype` from the memory's begin.
        shape: of the tensor.
    """
    offset = memory.storage_offset() // dtype.itemsize + start
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), offset, tuple(shape), contiguous_stride(shape))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns torch's strides of a contiguous tensor: an empty dim counts as 1."""
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def tensor_shape(layout: Layout, i: int) -> tuple[int, ...]:
    """Returns the shape of tensor `i`; one dim if the layout has no shape."""
    spec = layout.specs[i]
    return (spec.numel,) if spec.shape is None else spec.shape


def ragged_shard(layout: Layout, i: int, *, bases_differ: bool = False) -> RaggedShard:
    """Returns the placement whose shards are those of tensor `i` in the layout.

    As few leading dims are cut as the tensor's units allow: rows where the units are rows, and
    none where one rank owns it. An empty tensor is rank 0's.

    Args:
        layout: of the tensors.
        i: place of the tensor.
        bases_differ: whether the layout's shape is the largest of several; see `Inner`.
    """
    if layout.specs[i].numel == 0:
        return RaggedShard.owned_by(0, layout.world_size)
    shape, unit, cut = tensor_shape(layout, i), layout.unit_size(i), 0
    while unit % math.prod(shape[cut:]):
        cut += 1
    # Made again each time, which registers it: ragged_shard.uninstall() unregisters placements.
    unit_length = unit // math.prod(shape[cut:]) if bases_differ and cut else None
    return RaggedShard(range(cut), _units(layout, i), unit_length)


@lru_cache(maxsize=4096)  # it counts the units of all ranks; layers often have equal layouts
def _units(layout: Layout, i: int) -> tuple[int, ...]:
    return tuple(layout.units(i))
