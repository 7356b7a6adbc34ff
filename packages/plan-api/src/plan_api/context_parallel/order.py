"""Which part of a sequence each rank has, and which keys its queries see.

With causal attention, query i sees keys up to i. Of contiguous cuts the last rank then has almost
twice the mean work. In zig-zag order a sequence is cut into 2N chunks, and rank r has chunks r and
2N-1-r: an early and a late one, together the same work everywhere (Llama 3, section 3.3.2; torch
has it in torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch

from plan_api.spec.plan_entries import SequenceOrder

__all__ = ["ORDERS", "Order", "Piece", "piece_between", "pieces_over_all"]

ORDERS: tuple[SequenceOrder, ...] = get_args(SequenceOrder)


@dataclass(frozen=True)
class Order:
    """How a sequence is divided.

    Attributes:
        name: zigzag or contiguous.
        ranks: among so many.
    """

    name: SequenceOrder
    ranks: int

    @property
    def chunks(self) -> int:
        """Into how many chunks of equal length a sequence is cut."""
        return 2 * self.ranks if self.name == "zigzag" else self.ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks that a rank has, by number, in the order in which it has them."""
        return (rank, self.chunks - 1 - rank) if self.name == "zigzag" else (rank,)

    def all_chunks(self) -> list[int]:
        """Those of all ranks, one rank after the other."""
        return [chunk for rank in range(self.ranks) for chunk in self.chunks_of(rank)]

    def check(self, length: int, what: str) -> None:
        """Refuses a sequence that cannot be cut so.

        Args:
            length: of the whole sequence.
            what: begins the message.

        Raises:
            ValueError: it is no multiple of the number of chunks.
        """
        if length % self.chunks:
            raise ValueError(
                f"{what}: a sequence of {length} cannot be cut into {self.chunks} equal chunks, "
                f"as {self.name} order on {self.ranks} ranks needs; pad it to a multiple of "
                f"{self.chunks}"
            )

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Where in the sequence stands what all ranks have, one rank after the other.

        Args:
            length: of the whole sequence, a multiple of `chunks`.
            device: of the result, int64 of (length,).
        """
        by_chunk = torch.arange(length, device=device).view(self.chunks, -1)
        return by_chunk[self.all_chunks()].flatten()


@dataclass(frozen=True)
class Piece:
    """Queries against keys, by their places on this rank.

    Attributes:
        queries: among this rank's.
        keys: among those at hand.
        causal: whether they are the same tokens, of which each sees those up to itself; otherwise
            each sees all.
    """

    queries: slice
    keys: slice
    causal: bool

    @property
    def products(self) -> int:
        """How many products of a query and a key are not masked."""
        queries: int = self.queries.stop - self.queries.start
        keys: int = self.keys.stop - self.keys.start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


def piece_between(
    order: Order, rank: int, source: int, queries: int, keys: int, causal: bool
) -> Piece | None:
    """What the queries of one rank see of the block of another; None: nothing.

    Args:
        order: of the sequence.
        rank: whose queries.
        source: whose keys.
        queries: how many a rank has.
        keys: how many a rank has.
        causal: as attention is.
    """
    of_queries, of_keys = slice(0, queries), slice(0, keys)
    if not causal or source == rank:
        # This rank's own chunks follow each other as in the sequence.
        return Piece(of_queries, of_keys, causal)
    if source < rank:
        # Of two chunks the source's late one comes after both of this rank's.
        return Piece(of_queries, slice(0, keys // len(order.chunks_of(source))), False)
    if order.name == "contiguous":
        return None
    # Both of the source's come after this rank's early chunk, and before its late one.
    return Piece(slice(queries // 2, queries), of_keys, False)


def pieces_over_all(
    order: Order, rank: int, queries: int, keys: int, causal: bool
) -> Iterator[Piece]:
    """What the queries of a rank see of all keys, which are in the order of the sequence.

    Args:
        order: of the sequence.
        rank: whose queries.
        queries: how many it has.
        keys: how many there are.
        causal: as attention is.
    """
    if not causal:
        yield Piece(slice(0, queries), slice(0, keys), False)
        return
    length = keys // order.chunks
    for at, chunk in enumerate(order.chunks_of(rank)):
        own, before = slice(at * length, (at + 1) * length), chunk * length
        if before:
            yield Piece(own, slice(0, before), False)
        yield Piece(own, slice(before, before + length), True)
