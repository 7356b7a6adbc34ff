"""Which tokens of a sequence each rank has.

In causal attention query i attends to keys up to i. In contiguous order the last rank then has
almost twice the mean work. In zig-zag order a sequence is split into 2N chunks, and rank r has
chunks r and 2N-1-r: an early and a late one, together the same work on all ranks (Llama 3, section
3.3.2; torch/distributed/tensor/experimental/_context_parallel/_load_balancer.py). For other masks
`balanced_order` chooses an order by their area.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias, get_args

import torch

from plan_api._compat import on_host
from plan_api.context_parallel.mask import AttentionMask, key_ranges
from plan_api.spec.plan_entries import SequenceOrder

__all__ = [
    "ORDERS", "Positions", "SequenceSharding", "TokenOrder", "areas", "balanced_order", "within",
]  # fmt: skip

ORDERS: tuple[SequenceOrder, ...] = get_args(SequenceOrder)
#: Ascending ranges of positions, from the first up to, and without, the second.
Positions: TypeAlias = tuple[tuple[int, int], ...]
_BALANCED = 1.1  # of the mean area, what the busiest rank may have
_SHORTEST_CHUNK = 8  # below, tiles are too small to gain anything


@dataclass(frozen=True)
class TokenOrder:
    """The positions of each rank's tokens, ascending on each rank, and as many on all.

    Attributes:
        length: of the sequence. Positions from it on are padding, so that all ranks have as many.
        parts: by rank.
    """

    length: int
    parts: tuple[Positions, ...]

    @property
    def ranks(self) -> int:
        """The number of parts."""
        return len(self.parts)

    @property
    def local_length(self) -> int:
        """The number of tokens of a rank, with padding."""
        return sum(stop - start for start, stop in self.parts[0])

    @property
    def padded_length(self) -> int:
        """The number of tokens of all ranks, with padding."""
        return self.local_length * self.ranks

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks' tokens follow each other in the sequence."""
        each = self.local_length
        return self.parts == tuple(((n * each, (n + 1) * each),) for n in range(self.ranks))

    def positions(self, device: torch.device | None = None) -> torch.Tensor:
        """Returns the positions of the tokens of all ranks, rank by rank: int64."""
        ranges = [torch.arange(*one, device=device) for part in self.parts for one in part]
        return torch.cat(ranges)

    def grouped(self, ranks: int) -> TokenOrder:
        """Returns the order of groups of consecutive ranks, whose tokens are put together."""
        firsts = range(0, self.ranks, ranks)
        joined = (sum(self.parts[first : first + ranks], ()) for first in firsts)
        return TokenOrder(self.length, tuple(_merged(tuple(sorted(one))) for one in joined))

    def ascending(
        self, ranks: int, group: int, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Returns how to put the tokens of a group of consecutive ranks, rank by rank, in order.

        Args:
            ranks: the number of ranks of a group.
            group: its number.
            device: of the result.

        Returns:
            where each token of the order is: int64; None: they are in order.
        """
        joined = sum(self.parts[group * ranks : (group + 1) * ranks], ())
        if all(left[1] <= right[0] for left, right in pairwise(joined)):
            return None
        return torch.cat([torch.arange(*one, device=device) for one in joined]).argsort()

    def divided(self, ranks: int) -> TokenOrder:
        """Returns the order in which each part is divided among this number of ranks, in its order.

        Raises:
            ValueError: the number does not divide the length of a part.
        """
        if self.local_length % ranks:
            raise ValueError(
                f"expected parts whose length {ranks} ranks divide, got {self.local_length}"
            )
        each = self.local_length // ranks
        parts = [
            within(p, slice(n * each, (n + 1) * each)) for p in self.parts for n in range(ranks)
        ]
        return TokenOrder(self.length, tuple(parts))


def within(positions: Positions, indices: slice) -> Positions:
    """Returns the positions of a slice of a rank's tokens.

    Args:
        positions: of the rank's tokens.
        indices: which of the tokens, with a start and a stop.
    """
    found, before = [], 0
    for start, stop in positions:
        first = max(start, start + indices.start - before)
        last = min(stop, start + indices.stop - before)
        if first < last:
            found.append((first, last))
        before += stop - start
    return tuple(found)


def _merged(positions: Positions) -> Positions:
    merged: list[tuple[int, int]] = []
    for start, stop in positions:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


@dataclass(frozen=True)
class SequenceSharding:
    """How sequences of any length are divided among ranks.

    Attributes:
        name: ``"zigzag"`` or ``"contiguous"``; ``"balanced"`` is zig-zag where no mask is known.
        ranks: the size of the mesh axis.
    """

    name: SequenceOrder
    ranks: int

    @property
    def chunks(self) -> int:
        """The number of chunks of equal length in a sequence."""
        return self.ranks if self.name == "contiguous" else 2 * self.ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Returns the chunk numbers of a rank, in its order."""
        return (rank,) if self.name == "contiguous" else (rank, self.chunks - 1 - rank)

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
                f"multiple of {self.chunks}, or run the step within plan_api.attention_mask(mask)"
            )

    def token_order(self, length: int) -> TokenOrder:
        """Returns the positions of each rank's tokens.

        Args:
            length: of the global sequence, which is padded at its end to a multiple of `chunks`.
        """
        each = -(-length // self.chunks)
        parts = [
            _merged(tuple((chunk * each, (chunk + 1) * each) for chunk in self.chunks_of(rank)))
            for rank in range(self.ranks)
        ]
        return TokenOrder(length, tuple(parts))


def balanced_order(mask: AttentionMask, length: int, ranks: int) -> TokenOrder:
    """Chooses which tokens each rank has, so that all have about the same area of a mask.

    The sequence is split into chunks of equal length, as few as give a balance: 1 for each rank, or
    2, 4 and so on. The chunk with the largest area is given to the rank with the smallest, and so
    on (Graham's longest processing time first, with equally many chunks for each rank). Causal
    attention has 2 chunks for each rank, those of zig-zag order; a window shorter than a rank's
    part has 1, so that only neighbours exchange keys. The result depends on the arguments only.

    Args:
        mask: of the batch on this rank; areas of its rows are added.
        length: of the sequence, which is padded at its end for equal chunks.
        ranks: the number of ranks.
    """
    best: tuple[float, TokenOrder] | None = None
    area = _cumulative_area(mask, length)
    mean = area[-1] / ranks
    each = 1
    while best is None or (best[0] > _BALANCED * mean and length >= _SHORTEST_CHUNK * ranks * each):
        chunk = -(-length // (ranks * each))
        edges = [min(number * chunk, length) for number in range(ranks * each + 1)]
        costs = [area[stop] - area[start] for start, stop in pairwise(edges)]
        chunks: list[list[int]] = [[] for _ in range(ranks)]
        totals = [0] * ranks
        for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
            rank = min(
                (rank for rank in range(ranks) if len(chunks[rank]) < each),
                key=lambda rank: (totals[rank], rank),
            )
            chunks[rank].append(number)
            totals[rank] += costs[number]
        if best is None or max(totals) < best[0]:
            # The ranks are numbered by their first tokens, so that neighbours have neighbours.
            parts = sorted(
                _merged(tuple((one * chunk, (one + 1) * chunk) for one in sorted(numbers)))
                for numbers in chunks
            )
            best = max(totals), TokenOrder(length, tuple(parts))
        each *= 2
    return best[1]


def areas(mask: AttentionMask, order: TokenOrder) -> list[int]:
    """Returns the area of the mask for each rank's queries, summed over rows of the batch."""
    area = _cumulative_area(mask, order.length)
    return [
        sum(area[min(stop, order.length)] - area[min(start, order.length)] for start, stop in part)
        for part in order.parts
    ]


@on_host
def _cumulative_area(mask: AttentionMask, length: int) -> list[int]:
    """Returns the area of the queries before each position, and of all."""
    area = torch.zeros(length + 1, dtype=torch.int64)
    for row in range(mask.rows):
        ranges = key_ranges(mask.row(row), length)
        area[1:] += torch.tensor(ranges.stop) - torch.tensor(ranges.start)
    return area.cumsum(0).tolist()
