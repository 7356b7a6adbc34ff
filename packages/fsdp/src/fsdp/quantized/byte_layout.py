"""The layout of the bytes that ranks send of a group with quantized parameters.

Note: each rank sends one *chunk*. It has, of every parameter that the rank has a part of, in the
order of the group's layout, codes and then scales, or the part in the compute dtype. The chunks of
all ranks follow each other, and are as large as the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp.quantized.tiles import Tiles
from ragged_shard.planner import Layout, TensorSpec

__all__ = ["ByteLayout", "ParamFormat", "SentPart", "byte_layout_of"]

ALIGNMENT = 16  # bytes, of which a tensor's begin is a multiple


@dataclass(frozen=True)
class ParamFormat:
    """The form in which a parameter is sent.

    Attributes:
        dtype: if it is not quantized.
        shape: of the parameter.
        tiles: None if it is not quantized.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tiles: Tiles | None


@dataclass(frozen=True)
class SentPart:
    """What one rank sends of one parameter.

    Attributes:
        param: its number in the group.
        rank: that sends it.
        begin: of its elements in the group's buffer.
        numel: how many, at least one.
        values: number of the tensor of codes, or of elements, in the layout of bytes.
        scales: number of the tensor of scales; None if it is not quantized.
    """

    param: int
    rank: int
    begin: int
    numel: int
    values: int
    scales: int | None


@dataclass(frozen=True)
class ByteLayout:
    """A layout of bytes whose shards are the ranks' chunks, and the parts in them."""

    layout: Layout
    parts: tuple[SentPart, ...]


def byte_layout_of(layout: Layout, formats: Sequence[ParamFormat]) -> ByteLayout:
    """Returns what is sent of a group; it is the same on every rank.

    Args:
        layout: of the group, whose rank boundaries split no tile.
        formats: of its parameters, in order.
    """
    specs: list[TensorSpec] = []
    offsets: list[tuple[int, int]] = []  # of each tensor: rank, and offset in its chunk
    parts: list[SentPart] = []
    largest = 0

    def append(name: str, rank: int, offset: int, nbytes: int) -> int:
        specs.append(TensorSpec(f"{name}[{rank}]", nbytes))
        offsets.append((rank, offset))
        return offset + -(-nbytes // ALIGNMENT) * ALIGNMENT

    for rank in range(layout.world_size):
        end = 0
        for part in layout.parts(rank):
            form, numel = formats[part.tensor], part.interval.size
            name, values, scales = layout.specs[part.tensor].name, len(specs), None
            if form.tiles is None:
                end = append(name, rank, end, numel * form.dtype.itemsize)
            else:
                grid = form.tiles.grid(form.tiles.matrices(numel, form.shape))
                end = append(f"{name}, codes", rank, end, numel)
                scales = len(specs)
                end = append(f"{name}, scales", rank, end, math.prod(grid) * 4)
            begin = rank * layout.shard_size + part.offset
            parts.append(SentPart(part.tensor, rank, begin, numel, values, scales))
        largest = max(largest, end)
    made = Layout(
        tuple(specs), layout.world_size, ALIGNMENT, align_starts=True,
        order=tuple(range(len(specs))),
        starts=tuple(rank * largest + offset for rank, offset in offsets),
        shard_size=largest, proved_lower_bound=0, exact=False,
    )  # fmt: skip
    return ByteLayout(made, tuple(parts))
