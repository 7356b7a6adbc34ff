"""Which chunks of a sequence each rank has, and which keys its queries attend to.

In causal attention query i attends to keys up to i. In contiguous order the last rank then has
almost twice the mean work. In zig-zag order a sequence is split into 2N chunks, and rank r has
chunks r and 2N-1-r: an early and a late one, together the same work on all ranks (Llama 3, section
3.3.2; torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch.distributed.device_mesh import DeviceMesh

from plan_api.runtime.error_context import StepContext
from plan_api.spec.plan_entries import SequenceOrder

__all__ = [
    "ORDERS",
    "AttentionCall",
    "AttentionTile",
    "SequenceSharding",
    "tile_between",
    "tiles_over_all",
]

ORDERS: tuple[SequenceOrder, ...] = get_args(SequenceOrder)


@dataclass(frozen=True)
class SequenceSharding:
    """How a sequence is divided among ranks.

    Attributes:
        name: ``"zigzag"`` or ``"contiguous"``.
        ranks: the size of the mesh axis.
    """

    name: SequenceOrder
    ranks: int

    @property
    def chunks(self) -> int:
        """The number of chunks of equal length in a sequence."""
        return 2 * self.ranks if self.name == "zigzag" else self.ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Returns the chunk numbers of a rank, in its order."""
        return (rank, self.chunks - 1 - rank) if self.name == "zigzag" else (rank,)

    def all_chunks(self) -> list[int]:
        """Returns the chunk numbers of all ranks, rank by rank."""
        return [chunk for rank in range(self.ranks) for chunk in self.chunks_of(rank)]

    def check_length(self, length: int, what: str) -> None:
        """Checks that a sequence can be divided.

        Args:
            length: of the global sequence.
            what: the tensor, for the message.

        Raises:
            ValueError: the length is not a multiple of the number of chunks.
        """
        if length % self.chunks:
            raise ValueError(
                f"{what}: expected a sequence length that is a multiple of {self.chunks}, the "
                f"chunks of {self.name} order on {self.ranks} ranks, got {length}; pad it to a "
                f"multiple of {self.chunks}"
            )

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Returns the positions in the sequence of the tokens of all ranks, rank by rank.

        Args:
            length: of the global sequence, a multiple of `chunks`.
            device: of the result, int64 of (length,).
        """
        by_chunk = torch.arange(length, device=device).view(self.chunks, -1)
        return by_chunk[self.all_chunks()].flatten()


@dataclass(frozen=True)
class AttentionTile:
    """Queries and keys of one kernel call, by their positions on this rank.

    Attributes:
        queries: a range of this rank's queries.
        keys: a range of the keys at hand.
        causal: whether both are the same tokens, and each query attends to the keys up to itself;
            otherwise each attends to all.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def products(self) -> int:
        """The number of products of a query and a key that are not masked."""
        queries: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, on local tensors of (batch, heads, sequence, features).

    Attributes:
        mesh: the plan's mesh.
        axis: the mesh axis that shards the sequence, by number.
        order: of the sequence.
        causal: whether each query attends to the keys up to itself only.
        scale: of products before the softmax; None: by the root of the number of features.
        where: the module, for messages.
        backward_context: the step of the plan, for errors in backward; None: there is no plan.
    """

    mesh: DeviceMesh
    axis: int
    order: SequenceSharding
    causal: bool
    scale: float | None
    where: str
    backward_context: StepContext | None = None

    @property
    def rank(self) -> int:
        """This rank's coordinate along the axis."""
        return self.mesh.get_local_rank(self.axis)


def tile_between(
    order: SequenceSharding, rank: int, source: int, queries: int, keys: int, causal: bool
) -> AttentionTile | None:
    """Returns what the queries of one rank attend to in the block of another; None: nothing.

    Args:
        order: of the sequence.
        rank: the rank of the queries.
        source: the rank of the keys.
        queries: the number of queries of a rank.
        keys: the number of keys of a rank.
        causal: whether attention is causal.
    """
    all_queries, all_keys = slice(0, queries), slice(0, keys)
    if not causal or source == rank:
        # A rank's own chunks follow each other as in the sequence.
        return AttentionTile(all_queries, all_keys, causal)
    if source < rank:
        # The late one of two chunks of the source follows both chunks of this rank.
        return AttentionTile(all_queries, slice(0, keys // len(order.chunks_of(source))), False)
    if order.name == "contiguous":
        return None
    # Both chunks of the source follow this rank's early chunk, and precede its late one.
    return AttentionTile(slice(queries // 2, queries), all_keys, False)


def tiles_over_all(
    order: SequenceSharding, rank: int, queries: int, keys: int, causal: bool
) -> Iterator[AttentionTile]:
    """Returns the tiles of a rank's queries over all keys, which are in the sequence's order.

    Args:
        order: of the sequence.
        rank: the rank of the queries.
        queries: the number of queries of a rank.
        keys: the number of keys of all ranks.
        causal: whether attention is causal.
    """
    if not causal:
        yield AttentionTile(slice(0, queries), slice(0, keys), False)
        return
    length = keys // order.chunks
    for number, chunk in enumerate(order.chunks_of(rank)):
        own, start = slice(number * length, (number + 1) * length), chunk * length
        if start:
            yield AttentionTile(own, slice(0, start), False)
        yield AttentionTile(own, slice(start, start + length), True)
