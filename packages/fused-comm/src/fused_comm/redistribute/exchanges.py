"""All-gathers and all-to-alls of many local tensors in one collective.

Note: `ShardExchange` puts together what `bucket.py` takes apart. A tensor's *slot* is one range of
every *row*; a rank sends a row to each rank that gets something else from it, or one row that all
get, and receives a row from each. Rows are padded to the largest shard, in the buffer only.

`FlatRangeExchange` is for placements that give each rank of an axis one range of the flattened
tensor (`FlatRangePlacement`). They may give whole tensors to single ranks, so the number of
elements differs from rank to rank, and nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.process_groups import FlatGroup
from fused_comm.sharding import Slices, numel, shape_of, shard_slices

__all__ = [
    "FlatRangeExchange", "FlatRangeItem", "FlatRangePlacement", "ShardExchange", "ShardItem",
]  # fmt: skip


@dataclass(frozen=True)
class ShardItem:
    """A tensor of a `ShardExchange`.

    Attributes:
        local: the local tensor.
        shape: of the local result.
        joined: the dims on which the shards of all ranks are concatenated, each with the number of
            ranks along its axis, in the order of the axes.
        split: the same of the dims along which each rank gets a shard only; empty for a gather.
    """

    local: torch.Tensor
    shape: torch.Size
    joined: tuple[tuple[int, int], ...]
    split: tuple[tuple[int, int], ...]


class ShardExchange:
    """One all-gather of many local tensors, or one all-to-all; started at once.

    Args:
        items: all of one dtype and device, along axes of the same ranks, all split or none.
        group: the ranks.
    """

    def __init__(self, items: Sequence[ShardItem], group: FlatGroup) -> None:
        self._items = items
        split = bool(items[0].split)
        sent = [_shards(item.local.shape, item.split, group) for item in items]
        self._received = [_shards(item.shape, item.joined, group) for item in items]
        # The largest shard that any rank sends is the first rank's to the first: chunks shrink.
        sizes = [
            numel(shard_slices(shape_of(shard_slices(_joint_shape(item), item.joined, 0)),
                               item.split, 0))
            for item in items
        ]  # fmt: skip
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        like, row_size = items[0].local, sum(sizes)
        self._send = like.new_empty((group.size if split else 1, row_size))
        self._receive = like.new_empty((group.size, row_size))
        targets, sources = [], []
        for item, start, shards in zip(items, self._starts, sent, strict=True):
            for row, shard in zip(self._send, shards, strict=False):
                targets.append(_view(row, start, shard))
                sources.append(item.local[shard])
        torch._foreach_copy_(targets, sources)
        self._work = self._start(group, split=split)

    def wait(self) -> list[torch.Tensor]:
        """Waits for the collective and returns the local results, contiguous."""
        if self._work is not None:
            self._work.wait()
        results, targets, sources = [], [], []
        for item, start, shards in zip(self._items, self._starts, self._received, strict=True):
            result = item.local.new_empty(item.shape)
            results.append(result)
            for row, shard in zip(self._receive, shards, strict=True):
                targets.append(result[shard])
                sources.append(_view(row, start, shard))
        torch._foreach_copy_(targets, sources)
        return results

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        shapes = ", ".join(str(tuple(item.shape)) for item in self._items)
        return f"fused-comm: exchange of {len(self._items)} tensors with result shapes {shapes}"

    def _start(self, group: FlatGroup, *, split: bool) -> dist.Work | None:
        if group.size == 1:
            self._receive.copy_(self._send)
            return None
        collective = _compat.all_to_all if split else _compat.all_gather
        return collective(self._receive.view(-1), self._send.view(-1), group.group)


def _joint_shape(item: ShardItem) -> list[int]:
    """Returns the shape of all ranks' results together, before they are split."""
    shape = list(item.shape)
    for dim, _ in item.split:
        shape[dim] = item.local.shape[dim]
    return shape


def _shards(
    shape: Sequence[int], splits: Sequence[tuple[int, int]], group: FlatGroup
) -> list[Slices]:
    """Returns for each row the slices of its rank's shard."""
    return [shard_slices(shape, splits, position) for position in group.order]


def _view(row: torch.Tensor, start: int, shard: Slices) -> torch.Tensor:
    return row[start : start + numel(shard)].view(shape_of(shard))


@runtime_checkable
class FlatRangePlacement(Protocol):
    """A placement that gives each rank of its axis one range of the flattened base.

    The base is the local tensor if this axis replicated. ragged-shard's `RaggedShard` has these
    methods.
    """

    def interval(self, base_shape: Sequence[int], rank: int) -> range:
        """Returns the elements of the flattened base that a rank of the axis has."""

    def local_shape(self, base_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Returns the shape of the local tensor of a rank of the axis."""


@dataclass(frozen=True)
class FlatRangeItem:
    """A tensor of a `FlatRangeExchange`.

    Attributes:
        local: the local tensor, contiguous.
        before: the range of each rank of the group.
        after: the range of each rank in the result.
        shape: of the local result.
    """

    local: torch.Tensor
    before: tuple[range, ...]
    after: tuple[range, ...]
    shape: tuple[int, ...]


class FlatRangeExchange:
    """One all-to-all of many local tensors, started at once; none where no element is sent.

    Only elements that change their rank are sent. A result may be a view: of the local tensor where
    nothing changes, or of the received buffer.

    Args:
        items: all of one dtype and device, along axes of the same ranks.
        group: the ranks.
    """

    def __init__(self, items: Sequence[FlatRangeItem], group: dist.ProcessGroup) -> None:
        self._items, self._own, self._ranks = items, group.rank(), range(group.size())
        self._work: dist.Work | None = None
        if all(item.before == item.after for item in items):  # the same on all ranks
            return
        own, like = self._own, items[0].local
        parts, sent, received = [], [], []
        for rank in self._ranks:
            others = [] if rank == own else items
            outgoing = [_overlap(item.before[own], item.after[rank]) for item in others]
            parts += [
                _part(item.local, item.before[own], overlap)
                for item, overlap in zip(others, outgoing, strict=True)
                if overlap
            ]
            sent.append(sum(map(len, outgoing)))
            received.append(
                sum(len(_overlap(item.before[rank], item.after[own])) for item in others)
            )
        self._send = torch.cat(parts) if parts else like.new_empty(0)
        self._receive = like.new_empty(sum(received))
        self._work = _compat.all_to_all(self._receive, self._send, group, received, sent)

    def wait(self) -> list[torch.Tensor]:
        """Waits for the collective and returns the local results."""
        if self._work is None:
            return [item.local.view(item.shape) for item in self._items]
        self._work.wait()
        del self._send
        return self._assemble(self._received_parts())

    def _received_parts(self) -> dict[tuple[int, int], torch.Tensor]:
        """Views of the received buffer, by item and rank."""
        own, start, parts = self._own, 0, {}
        for rank in self._ranks:
            for number, item in enumerate(self._items):
                overlap = _overlap(item.before[rank], item.after[own])
                if overlap and rank != own:
                    parts[number, rank] = self._receive[start : start + len(overlap)]
                    start += len(overlap)
        return parts

    def _assemble(self, received: dict[tuple[int, int], torch.Tensor]) -> list[torch.Tensor]:
        own, results, targets, sources = self._own, [], [], []
        for number, item in enumerate(self._items):
            unmoved = _overlap(item.before[own], item.after[own])
            parts = [
                (_overlap(item.before[rank], item.after[own]), part)
                for rank in self._ranks
                if (part := received.get((number, rank))) is not None
            ]
            if unmoved:
                parts.append((unmoved, _part(item.local, item.before[own], unmoved)))
            if len(parts) == 1:
                results.append(parts[0][1].view(item.shape))
                continue
            result = item.local.new_empty(math.prod(item.shape))
            results.append(result.view(item.shape))
            for overlap, part in parts:
                targets.append(_part(result, item.after[own], overlap))
                sources.append(part)
        if targets:
            torch._foreach_copy_(targets, sources)
        return results


def _overlap(one: range, other: range) -> range:
    """Returns the intersection of two ranges, which may be empty."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _part(local: torch.Tensor, local_range: range, part: range) -> torch.Tensor:
    """Returns the elements of a range of which a local tensor has all."""
    return local.view(-1)[part.start - local_range.start : part.stop - local_range.start]
