"""Shards of many tensors gathered, or exchanged, in one collective.

Note: what `bucket.py` cuts is put together here. A tensor's *slot* is one range of every *row*; a
rank gives a row to each rank that gets something else from it, or one row that all get, and gets a
row from each. Rows are padded to the largest piece, in the buffer only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fused_comm import _compat
from fused_comm.axes import FlatGroup
from fused_comm.pieces import Piece, numel, piece_at, shape_of

__all__ = ["Exchange", "Item"]


@dataclass(frozen=True)
class Item:
    """A tensor of an exchange.

    Attributes:
        local: what this rank has.
        shape: of the local result.
        joined: the dims on which the pieces of all ranks are put together, each with the number of
            ranks along its axis, in the order of the axes.
        cut: the same of the dims along which each rank gets a piece only; empty for a gather.
    """

    local: torch.Tensor
    shape: torch.Size
    joined: tuple[tuple[int, int], ...]
    cut: tuple[tuple[int, int], ...]


class Exchange:
    """One all-gather of many local tensors, or where they are cut one all-to-all; started at once.

    Args:
        items: all of one dtype and device, along axes of the same ranks, all cut or none.
        group: those ranks.
    """

    def __init__(self, items: Sequence[Item], group: FlatGroup) -> None:
        self._items = items
        cut = bool(items[0].cut)
        given = [_pieces(item.local.shape, item.cut, group) for item in items]
        self._got = [_pieces(item.shape, item.joined, group) for item in items]
        # The largest piece that any rank gives is the first's to the first: chunks shrink.
        sizes = [
            numel(piece_at(shape_of(piece_at(_whole(item), item.joined, 0)), item.cut, 0))
            for item in items
        ]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        like, row = items[0].local, sum(sizes)
        self._send = like.new_empty((group.size if cut else 1, row))
        self._receive = like.new_empty((group.size, row))
        into, out_of = [], []
        for item, start, pieces in zip(items, self._starts, given, strict=True):
            for line, piece in zip(self._send, pieces, strict=False):
                into.append(_at(line, start, piece))
                out_of.append(item.local[piece])
        torch._foreach_copy_(into, out_of)
        self._work = self._start(group, cut=cut)

    def land(self) -> list[torch.Tensor]:
        """Waits for it: the local results, contiguous."""
        if self._work is not None:
            self._work.wait()
        results, into, out_of = [], [], []
        for item, start, pieces in zip(self._items, self._starts, self._got, strict=True):
            result = item.local.new_empty(item.shape)
            results.append(result)
            for line, piece in zip(self._receive, pieces, strict=True):
                into.append(result[piece])
                out_of.append(_at(line, start, piece))
        torch._foreach_copy_(into, out_of)
        return results

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        shapes = ", ".join(str(tuple(item.shape)) for item in self._items)
        return f"fused-comm: {len(self._items)} tensors in one exchange, to be {shapes}"

    def _start(self, group: FlatGroup, *, cut: bool) -> dist.Work | None:
        if group.size == 1:
            self._receive.copy_(self._send)
            return None
        exchange = _compat.all_to_all if cut else _compat.all_gather
        return exchange(self._receive.view(-1), self._send.view(-1), group.group)


def _whole(item: Item) -> list[int]:
    """The result's shape where it is cut no more: what all ranks' results together are."""
    shape = list(item.shape)
    for dim, _ in item.cut:
        shape[dim] = item.local.shape[dim]
    return shape


def _pieces(shape: Sequence[int], cuts: Sequence[tuple[int, int]], group: FlatGroup) -> list[Piece]:
    """Per row, the piece of the rank whose row it is."""
    return [piece_at(shape, cuts, position) for position in group.order]


def _at(line: torch.Tensor, start: int, piece: Piece) -> torch.Tensor:
    return line[start : start + numel(piece)].view(shape_of(piece))
