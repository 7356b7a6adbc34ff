"""Finds tensors by index or name in a layout, and what a buffer has between and behind them."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from dbuffer.placements import LocalTensor
from ragged_shard.planner import Interval, Layout

__all__ = ["Tensors", "by_index", "padding_of", "pieces_of"]

# All tensors in the order of the layout, None for those that are missing; or some by place or name.
Tensors: TypeAlias = Sequence[torch.Tensor | None] | Mapping[int | str, torch.Tensor]


def by_index(
    layout: Layout, local: Sequence[LocalTensor], tensors: Tensors, what: str
) -> dict[int, torch.Tensor]:
    """Returns the tensors by their index in the layout, without missing ones.

    Args:
        layout: of the tensors.
        local: their shapes on this rank.
        tensors: as of `DBuffer.copy_from`.
        what: names the method.

    Raises:
        ValueError: too few or too many, an unknown place or name, another shape.
    """
    count = len(layout.specs)
    if isinstance(tensors, Mapping):
        found = {index_of(layout, key): tensor for key, tensor in tensors.items()}
    elif len(tensors) != count:
        raise ValueError(
            f"DBuffer.{what}: expected a tensor, or None, for each of the layout's {count}, got "
            f"{len(tensors)}; give a dict by name for some of them"
        )
    else:
        found = {i: tensor for i, tensor in enumerate(tensors) if tensor is not None}
    for i, tensor in found.items():
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"DBuffer.{what}: expected the local tensor of tensor {i} "
                f"({layout.specs[i].name!r}), got a DTensor; call its to_local()"
            )
        if tuple(tensor.shape) != local[i].shape:
            raise ValueError(
                f"DBuffer.{what}: expected tensor {i} ({layout.specs[i].name!r}) of shape "
                f"{local[i].shape}, got {tuple(tensor.shape)}"
            )
    return found


def index_of(layout: Layout, key: int | str) -> int:
    """Returns the index of a tensor, given its index or name.

    Raises:
        ValueError: there is none, or several have the name.
    """
    if isinstance(key, SupportsIndex):
        key = operator.index(key)
        if 0 <= key < len(layout.specs):
            return key
        raise ValueError(
            f"DBuffer: expected the number of a tensor, 0 to {len(layout.specs) - 1}, got {key}"
        )
    places = [i for i, spec in enumerate(layout.specs) if spec.name == key]
    if len(places) != 1:
        names = ", ".join(repr(spec.name) for spec in layout.specs[:8])
        more = ", ..." if len(layout.specs) > 8 else ""
        remedy = "give its number" if places else "give one of these names"
        raise ValueError(
            f"DBuffer: expected one tensor named {key!r}, got {len(places)} among {names}{more}; "
            f"{remedy}"
        )
    return places[0]


def pieces_of(
    layout: Layout, tensors: Mapping[int, torch.Tensor], rank: int | None
) -> dict[int, torch.Tensor]:
    """Returns a rank's parts of full tensors, flat; the full tensors if `rank` is None."""
    if rank is None:
        return dict(tensors)
    pieces = {}
    for i, tensor in tensors.items():
        part = layout.part(i, rank)
        if part.size:  # a tensor that is smaller than its place may have nothing of it
            pieces[i] = tensor.reshape(-1)[part.start : part.stop]
    return pieces


def padding_of(
    layout: Layout, local: Sequence[LocalTensor], region: torch.Tensor, rank: int | None
) -> list[torch.Tensor]:
    """Returns the ranges of the buffer, or of a rank's shard, that belong to no tensor.

    Args:
        layout: of the tensors.
        local: their shapes on this rank, which may be smaller than their places.
        region: the buffer, or the shard of `rank`.
        rank: None for the buffer.
    """
    rests = (
        Interval(start + math.prod(tensor.shape), start + spec.numel)
        for spec, start, tensor in zip(layout.specs, layout.starts, local, strict=True)
        if tensor.bases_differ
    )
    begin = 0 if rank is None else rank * layout.shard_size
    clipped = (
        (max(gap.start - begin, 0), min(gap.stop - begin, region.numel()))
        for gap in (*layout.padding_intervals(), *rests)
    )
    return [region[start:stop] for start, stop in clipped if start < stop]
