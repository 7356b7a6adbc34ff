"""Collectives made of sends between pairs of ranks: on gloo the faster way.

Each rank sends the others their row straight out of the buffer and adds up what it receives in the
order of ranks, so a sum has the same bits on every run and whoever owns it.

Sends carry a tag of the buffer and the collective (`Axis.tag`, `Kind`), so a gather of one buffer
never takes what a gather of another, or a reduction, has sent: where a rank leaves one out, both
sides wait for the process group's time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from dbuffer.collectives import Axis, Finish
from dbuffer.shutdown import alias

__all__ = ["Exchange"]


class Kind(IntEnum):
    """What is sent; two bits of the tag."""

    GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    ALL_REDUCE_END = 3


class Exchange:
    """`Collectives` by `isend` and `irecv`; see `dbuffer.collectives.Collectives`."""

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """Without any other memory; a row that lies elsewhere is copied while others are sent."""
        rows = flat.chunk(axis.size)
        finish = _gather(rows, axis, Kind.GATHER, own)
        if own.data_ptr() != rows[axis.position].data_ptr():
            rows[axis.position].copy_(own)
        return finish

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """With memory for the other ranks' rows until it is waited for."""
        return _reduce(flat.chunk(axis.size), axis, Kind.REDUCE_SCATTER, average=average)

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """A reduce-scatter, and when that is waited for an all-gather."""
        rows = flat.tensor_split(axis.size)  # of sizes that differ by one
        reduced = _reduce(rows, axis, Kind.ALL_REDUCE, average=average)

        def finish() -> None:
            reduced()
            _gather(rows, axis, Kind.ALL_REDUCE_END, rows[axis.position])()

        return finish


def _gather(rows: Sequence[torch.Tensor], axis: Axis, kind: Kind, own: torch.Tensor) -> Finish:
    works = []
    for position in _others(axis):
        works += _receive(rows[position], axis, position, kind)
        works += _send(own, axis, position, kind)
    return lambda: _wait_all(works)


def _reduce(rows: Sequence[torch.Tensor], axis: Axis, kind: Kind, *, average: bool) -> Finish:
    own, others = rows[axis.position], _others(axis)
    # (ranks - 1, row), of the rows' dtype: what the others send, ours until it is added up
    received = dict(zip(others, own.new_empty((len(others), own.numel())), strict=True))
    works = []
    for position in others:
        works += _receive(received[position], axis, position, kind)
        works += _send(rows[position], axis, position, kind)

    def finish() -> None:
        _wait_all(works)
        terms = [received.get(position, own) for position in range(axis.size)]
        total = terms[0]
        for position in range(1, axis.size):
            # From the own row on, the own row is where the sum is made: no copy at the end.
            into = own if position >= axis.position else total
            total = torch.add(total, terms[position], out=into)
        if average:
            own.div_(axis.size)

    return finish


def _others(axis: Axis) -> list[int]:
    """The other ranks' positions, beginning with the next, so that not all send to one."""
    return [(axis.position + step) % axis.size for step in range(1, axis.size)]


def _send(row: torch.Tensor, axis: Axis, position: int, kind: Kind) -> list[dist.Work | None]:
    if not row.numel():
        return []
    tag = axis.tag << 2 | kind
    return [dist.isend(alias(row), axis.ranks[position], group=axis.group, tag=tag)]


def _receive(row: torch.Tensor, axis: Axis, position: int, kind: Kind) -> list[dist.Work | None]:
    if not row.numel():
        return []
    tag = axis.tag << 2 | kind
    return [dist.irecv(alias(row), axis.ranks[position], group=axis.group, tag=tag)]


def _wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "checked by DBuffer: this rank is in the mesh"
        work.wait()
