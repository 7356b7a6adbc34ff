"""Tensors of which each rank holds one run, given out in other runs: one all-to-all for them all.

Note: a *run* is a range of a flattened tensor. A placement that gives each rank of its axis one run
(`HoldsRuns`) may give whole tensors to single ranks, each to another: what goes to a rank is then
not what goes to the next, and nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fused_comm import _compat

__all__ = ["HoldsRuns", "RunExchange", "RunItem"]


@runtime_checkable
class HoldsRuns(Protocol):
    """A placement, as ragged-shard's `RaggedShard`, that cuts what the other axes leave, flat.

    That is the base: the local tensor if this axis replicated.
    """

    def interval(self, base_shape: Sequence[int], rank: int) -> range:
        """The elements of the flattened base that a rank of the axis holds."""

    def local_shape(self, base_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape in which it holds them."""


@dataclass(frozen=True)
class RunItem:
    """A tensor of an exchange.

    Attributes:
        local: this rank's run.
        before: the runs by rank of the group.
        after: those that they shall be.
        shape: of the local result.
    """

    local: torch.Tensor
    before: tuple[range, ...]
    after: tuple[range, ...]
    shape: tuple[int, ...]


class RunExchange:
    """One all-to-all of many local tensors, started at once; none where nothing moves.

    Only what changes its rank travels. A result may be a view: of the local tensor where it stays,
    or of what was received.

    Args:
        items: all of one dtype and device, along axes of the same ranks.
        group: those ranks.
    """

    def __init__(self, items: Sequence[RunItem], group: dist.ProcessGroup) -> None:
        self._items, self._here, self._ranks = items, group.rank(), range(group.size())
        self._work: dist.Work | None = None
        if all(item.before == item.after for item in items):  # all ranks know it
            return
        here, like = self._here, items[0].local
        pieces, sent, received = [], [], []
        for rank in self._ranks:
            others = [] if rank == here else items
            out = [_common(item.before[here], item.after[rank]) for item in others]
            pieces += [
                _part(item.local, item.before[here], run)
                for item, run in zip(others, out, strict=True)
                if run
            ]
            sent.append(sum(map(len, out)))
            received.append(
                sum(len(_common(item.before[rank], item.after[here])) for item in others)
            )
        self._send = torch.cat(pieces) if pieces else like.new_empty(0)
        self._receive = like.new_empty(sum(received))
        self._work = _compat.all_to_all(self._receive, self._send, group, received, sent)

    def land(self) -> list[torch.Tensor]:
        """Waits for it: the local results."""
        if self._work is None:
            return [item.local.view(item.shape) for item in self._items]
        self._work.wait()
        del self._send
        return self._put_together(self._taken_apart())

    def _taken_apart(self) -> dict[tuple[int, int], torch.Tensor]:
        """What came, by item and rank."""
        here, start, found = self._here, 0, {}
        for rank in self._ranks:
            for number, item in enumerate(self._items):
                run = _common(item.before[rank], item.after[here])
                if run and rank != here:
                    found[number, rank] = self._receive[start : start + len(run)]
                    start += len(run)
        return found

    def _put_together(self, came: dict[tuple[int, int], torch.Tensor]) -> list[torch.Tensor]:
        here, results, into, out_of = self._here, [], [], []
        for number, item in enumerate(self._items):
            own = _common(item.before[here], item.after[here])
            parts = [
                (_common(item.before[rank], item.after[here]), part)
                for rank in self._ranks
                if (part := came.get((number, rank))) is not None
            ]
            if own:
                parts.append((own, _part(item.local, item.before[here], own)))
            if len(parts) == 1:
                results.append(parts[0][1].view(item.shape))
                continue
            result = item.local.new_empty(math.prod(item.shape))
            results.append(result.view(item.shape))
            for run, part in parts:
                into.append(_part(result, item.after[here], run))
                out_of.append(part)
        if into:
            torch._foreach_copy_(into, out_of)
        return results


def _common(one: range, other: range) -> range:
    """What two runs have in common, perhaps nothing."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _part(local: torch.Tensor, held: range, run: range) -> torch.Tensor:
    """The elements of a run, which are among those that a local tensor holds."""
    return local.view(-1)[run.start - held.start : run.stop - held.start]
