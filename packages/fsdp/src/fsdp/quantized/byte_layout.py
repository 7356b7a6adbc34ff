"""The layout of the bytes that ranks send of a group with quantized parameters.

Note: each rank sends one *chunk*. It has, of every parameter that the rank has a part of, in the
order of the group's layout, codes and then scales, or the part in the compute dtype. The chunks of
all ranks follow each other, and are as large as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdp.quantized.operands import Direction, OperandFormat, TensorFormat
from fsdp.quantized.tiles import Tiles
from ragged_shard.planner import Layout, TensorSpec

__all__ = [
    "ALIGNMENT",
    "ByteLayout",
    "ParamFormat",
    "SentPart",
    "byte_layout_of",
    "layout_of_some",
]

ALIGNMENT = 16  # bytes, of which a tensor's begin is a multiple


@dataclass(frozen=True)
class ParamFormat:
    """The form in which a parameter is sent.

    Attributes:
        dtype: if it is not quantized.
        shape: of the parameter.
        tiles: None if it has none.
        operand: None if it is no operand of low-precision products.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tiles: Tiles | None
    operand: OperandFormat | None = None

    def tensors(self, numel: int, direction: Direction) -> tuple[TensorFormat, ...]:
        """Returns what is sent of a part of so many elements."""
        if self.operand is not None:
            columns = self.shape[-1]
            sent = self.operand.tensors((numel // columns, columns), direction)
            return tuple(TensorFormat(tuple(one.shape), one.dtype) for one in sent)
        if self.tiles is None:
            return (TensorFormat((numel,), self.dtype),)
        shape = self.tiles.matrices(numel, self.shape)
        scales = TensorFormat(self.tiles.grid(shape), torch.float32)
        return TensorFormat(shape, self.tiles.dtype), scales


@dataclass(frozen=True)
class SentTensor:
    """A tensor that is sent: its number in the layout of bytes, and its form."""

    number: int
    form: TensorFormat


@dataclass(frozen=True)
class SentPart:
    """What one rank sends of one parameter.

    Attributes:
        param: its number in the group.
        rank: that sends it.
        begin: of its elements in the parameter.
        numel: how many, at least one.
        tensors: what is sent.
    """

    param: int
    rank: int
    begin: int
    numel: int
    tensors: tuple[SentTensor, ...]


@dataclass(frozen=True)
class ByteLayout:
    """A layout of bytes whose shards are the ranks' chunks, and the parts in them."""

    layout: Layout
    parts: tuple[SentPart, ...]


def byte_layout_of(
    layout: Layout,
    formats: Sequence[ParamFormat],
    direction: Direction = "forward",
    only: Sequence[int] | None = None,
) -> ByteLayout:
    """Returns what is sent of a group; it is the same on every rank.

    Args:
        layout: of the group, whose rank boundaries split no tile, and no row of an operand.
        formats: of its parameters, in order.
        direction: of the products that take operands.
        only: the numbers of the parameters that are sent; None: all.
    """
    specs: list[TensorSpec] = []
    offsets: list[tuple[int, int]] = []  # of each tensor: rank, and offset in its chunk
    parts: list[SentPart] = []
    largest = 0
    for rank in range(layout.world_size):
        end = 0
        for part in layout.parts(rank):
            if only is not None and part.tensor not in only:
                continue
            numel, name = part.interval.size, layout.specs[part.tensor].name
            sent = []
            for number, form in enumerate(formats[part.tensor].tensors(numel, direction)):
                sent.append(SentTensor(len(specs), form))
                specs.append(TensorSpec(f"{name}, {number}[{rank}]", form.nbytes))
                offsets.append((rank, end))
                end += -(-form.nbytes // ALIGNMENT) * ALIGNMENT
            begin = rank * layout.shard_size + part.offset - layout.starts[part.tensor]
            parts.append(SentPart(part.tensor, rank, begin, numel, tuple(sent)))
        largest = max(largest, end)
    starts = tuple(rank * largest + offset for rank, offset in offsets)
    return ByteLayout(_placed(specs, layout.world_size, starts, largest), tuple(parts))


def layout_of_some(layout: Layout, only: Sequence[int]) -> Layout:
    """Returns a layout of some tensors of a group, for memory that all of them have room in.

    Args:
        layout: of the group.
        only: the numbers of the tensors.
    """
    specs = [layout.specs[number] for number in only]
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.numel // ALIGNMENT) * ALIGNMENT
    size = -(-end // (layout.world_size * ALIGNMENT)) * ALIGNMENT
    return _placed(specs, layout.world_size, tuple(starts), size)


def _placed(
    specs: Sequence[TensorSpec], ranks: int, starts: tuple[int, ...], shard_size: int
) -> Layout:
    return Layout(
        tuple(specs), ranks, ALIGNMENT, align_starts=True, order=tuple(range(len(specs))),
        starts=starts, shard_size=shard_size, proved_lower_bound=0, exact=False,
    )  # fmt: skip
