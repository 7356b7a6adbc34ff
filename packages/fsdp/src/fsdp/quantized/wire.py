"""Where the bytes lie that ranks send of a group with quantised parameters.

Note: each rank sends one *chunk*: of every parameter that it has a part of, in the order of the
group's layout, codes and then scales, or the part in the dtype that computes. The ranks' chunks
lie behind each other, and are as large as the largest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp.quantized.tiles import Tiles
from ragged_shard.planner import Layout, TensorSpec

__all__ = ["Form", "Piece", "Wire", "wire_of"]

ALIGNMENT = 16  # bytes, of which a tensor's begin is a multiple


@dataclass(frozen=True)
class Form:
    """What is sent of a parameter.

    Attributes:
        dtype: of what is sent if it is not quantised.
        shape: of the parameter.
        tiles: None if it is not quantised.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tiles: Tiles | None


@dataclass(frozen=True)
class Piece:
    """What one rank sends of one parameter.

    Attributes:
        param: its place in the group.
        rank: whose it is.
        begin: of its elements in the group's buffer.
        numel: how many, more than none.
        values: place in the wire's layout of codes, or of elements.
        scales: place of the scales; None if it is not quantised.
    """

    param: int
    rank: int
    begin: int
    numel: int
    values: int
    scales: int | None


@dataclass(frozen=True)
class Wire:
    """A layout of bytes, with each rank's chunk as its shard, and what is in it."""

    layout: Layout
    pieces: tuple[Piece, ...]


def wire_of(layout: Layout, forms: Sequence[Form]) -> Wire:
    """What is sent of a group; the same on every rank.

    Args:
        layout: of the group, whose cuts are between tiles.
        forms: of its parameters, in order.
    """
    specs: list[TensorSpec] = []
    offsets: list[tuple[int, int]] = []  # of each: rank, and place in the chunk
    pieces: list[Piece] = []
    largest = 0

    def add(what: str, rank: int, at: int, nbytes: int) -> int:
        specs.append(TensorSpec(f"{what}[{rank}]", nbytes))
        offsets.append((rank, at))
        return at + -(-nbytes // ALIGNMENT) * ALIGNMENT

    for rank in range(layout.world_size):
        end = 0
        for part in layout.parts(rank):
            form, numel = forms[part.tensor], part.interval.size
            name, values, scales = layout.specs[part.tensor].name, len(specs), None
            if form.tiles is None:
                end = add(name, rank, end, numel * form.dtype.itemsize)
            else:
                grid = form.tiles.grid(form.tiles.matrices(numel, form.shape))
                end = add(f"{name}, codes", rank, end, numel)
                scales = len(specs)
                end = add(f"{name}, scales", rank, end, math.prod(grid) * 4)
            begin = rank * layout.shard_size + part.offset
            pieces.append(Piece(part.tensor, rank, begin, numel, values, scales))
        largest = max(largest, end)
    made = Layout(
        tuple(specs), layout.world_size, ALIGNMENT, align_starts=True,
        order=tuple(range(len(specs))),
        starts=tuple(rank * largest + at for rank, at in offsets),
        shard_size=largest, proved_lower_bound=0, exact=False,
    )  # fmt: skip
    return Wire(made, tuple(pieces))
