"""The collectives of a buffer along one mesh axis, in place: the backend's, or by sends.

Note: `Exchange` makes them of sends between pairs of ranks, the faster way on gloo. Each rank sends
the others their row straight out of the buffer and adds up what it receives in the order of ranks,
so a sum has the same bits on every run and on every rank. Sends carry a tag of the buffer and the
collective (`Axis.tag`, `Kind`), so a gather of one buffer never takes what a gather of another, or
a reduction, has sent: where a rank leaves one out, both sides wait for the process group's
time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dbuffer import _compat
from dbuffer.shutdown import alias

__all__ = [
    "Axis",
    "Collectives",
    "Exchange",
    "Finish",
    "Handle",
    "Native",
    "Strategy",
    "axis_of",
    "collectives_for",
    "own_row",
]

Strategy: TypeAlias = Literal["auto", "native", "exchange"]
# Waits for a collective, and does what is left to be done when it has ended.
Finish: TypeAlias = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Axis:
    """The ranks along a mesh axis.

    Attributes:
        name: what errors call it.
        group: their process group.
        ranks: global ranks, in the order of the mesh, which is the order of shards.
        position: this rank's place among them.
        tag: under which a buffer sends between pairs of ranks, below 2 ** 29; the same on all.
    """

    name: str
    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    position: int
    tag: int = 0

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


class Handle:
    """What a collective returns: with ``async_op=True`` its buffer is not to be used before `wait`.

    On a GPU waiting makes the current stream wait, not the host; so nothing raises here when a rank
    does not take part, and NCCL's watchdog ends the process. Handles of "exchange" are waited for
    in the same order on every rank: an all-reduce sends its second half then.
    """

    def __init__(self, finish: Callable[[], None], what: Callable[[], str] | None = None) -> None:
        self._finish: Callable[[], None] | None = finish
        self._what = what

    @property
    def done(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    def wait(self) -> None:
        """Waits for the collective and finishes it; a second call does nothing."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _waits_for_(self) -> str:
        """Describes the collective and the buffer's tensors for `fused_comm.diagnosis`."""
        return "DBuffer: a collective" if self._what is None else self._what()


@runtime_checkable
class Collectives(Protocol):
    """The collectives of a buffer, which are asynchronous and in place.

    A *row* is one of the equal parts of `flat`, of which each rank of the axis owns one.
    """

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """Gathers every rank's row into `flat`; `own` is this rank's, in `flat` or elsewhere."""
        ...

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Reduces into this rank's row the sum over all ranks; other rows become undefined."""
        ...

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Sums `flat`, of any size, over all ranks."""
        ...


#: Backends whose reduce-scatter writes a rank's output before it has read that rank's input, of
#: which the output is a part here. NCCL and gloo document or support this; MPI forbids it.
_SEPARATE_OUTPUT = frozenset({"mpi", "threaded"})


class Native:
    """The backend's collectives, in place."""

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """Gathers as `Collectives.all_gather`."""
        return _wait(_compat.all_gather(flat, own, axis.group))

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Reduces as `Collectives.reduce_scatter`."""
        own, op = own_row(flat, axis), _reduce_op(axis, average=average)
        separate = dist.get_backend(axis.group) in _SEPARATE_OUTPUT
        output = torch.empty_like(own) if separate else own
        work = _compat.reduce_scatter(output, flat, op, axis.group)
        finish = _wait(work, output, axis.size if average and op == dist.ReduceOp.SUM else 1)

        def finish_and_copy() -> None:
            finish()
            own.copy_(output)

        return finish_and_copy if separate else finish

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Reduces as `Collectives.all_reduce`."""
        op = _reduce_op(axis, average=average)
        work = _compat.all_reduce(flat, op, axis.group)
        return _wait(work, flat, axis.size if average and op == dist.ReduceOp.SUM else 1)


class Kind(IntEnum):
    """The kind of a message; two bits of the tag."""

    GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    ALL_REDUCE_END = 3


class Exchange:
    """`Collectives` by `isend` and `irecv`; see `dbuffer.collectives.Collectives`."""

    def all_gather(self, flat: torch.Tensor, axis: Axis, own: torch.Tensor) -> Finish:
        """Gathers without temporary memory; a row in other memory is copied during the exchange."""
        rows = flat.chunk(axis.size)
        finish = _gather(rows, axis, Kind.GATHER, own)
        if own.data_ptr() != rows[axis.position].data_ptr():
            rows[axis.position].copy_(own)
        return finish

    def reduce_scatter(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Reduces with temporary memory for the other ranks' rows until it is waited for."""
        return _reduce(flat.chunk(axis.size), axis, Kind.REDUCE_SCATTER, average=average)

    def all_reduce(self, flat: torch.Tensor, axis: Axis, *, average: bool) -> Finish:
        """Issues a reduce-scatter, and when that is waited for an all-gather."""
        rows = flat.tensor_split(axis.size)  # of sizes that differ by one
        reduced = _reduce(rows, axis, Kind.ALL_REDUCE, average=average)

        def finish() -> None:
            reduced()
            _gather(rows, axis, Kind.ALL_REDUCE_END, rows[axis.position])()

        return finish


def own_row(flat: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Returns this rank's row, a view of `flat`.

    Args:
        flat: as a `Collectives` gets it; its elements are a multiple of the axis's ranks.
        axis: the ranks that `flat` is divided over.
    """
    return flat.view(axis.size, -1)[axis.position]


def axis_of(mesh: DeviceMesh, axis: int) -> Axis:
    """Returns this rank's group along an axis."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "checked by DBuffer"
    here = tuple(slice(None) if i == axis else at for i, at in enumerate(coordinate))
    ranks = tuple(int(rank) for rank in mesh.mesh[here].tolist())
    name = repr(mesh.mesh_dim_names[axis]) if mesh.mesh_dim_names else str(axis)
    return Axis(name, mesh.get_group(axis), ranks, coordinate[axis])


def collectives_for(
    strategy: Strategy | Collectives, axis: Axis, device: torch.device
) -> Collectives:
    """Returns the collectives of a strategy on an axis; custom ones are returned unchanged.

    "auto" is "exchange" on the host over gloo, whose native collectives take several times as long,
    and "native" elsewhere.

    Args:
        strategy: as in `DBuffer`.
        axis: on which the collectives are issued.
        device: of the buffer.

    Raises:
        ValueError: a strategy that does not exist, or that cannot work here.
    """
    # A check of a protocol takes as long as a small collective's other Python.
    if not isinstance(strategy, str) and isinstance(strategy, Collectives):
        return strategy
    if strategy not in ("auto", "native", "exchange"):
        raise ValueError(
            f"DBuffer: expected strategy to be 'auto', 'native', 'exchange', or an object with the "
            f"methods of Collectives, got {strategy!r}"
        )
    on_gloo = device.type == "cpu" and dist.get_backend(axis.group) == "gloo"
    if strategy == "exchange" and device.type != "cpu":
        raise ValueError(
            f"DBuffer: expected a CPU device for strategy='exchange', got {device}; use 'native'"
        )
    if strategy == "exchange" or (strategy == "auto" and on_gloo):
        return Exchange()
    if tuple(dist.get_process_group_ranks(axis.group)) != axis.ranks:
        raise ValueError(
            f"DBuffer: expected the process group of axis {axis.name} to have its ranks in the "
            f"order of the mesh, {axis.ranks}, got "
            f"{tuple(dist.get_process_group_ranks(axis.group))}, an order in which native "
            f"collectives would misplace shards; build the mesh with ascending ranks, or use "
            f"strategy='exchange'"
        )
    return Native()


def _reduce_op(axis: Axis, *, average: bool) -> dist.ReduceOp.RedOpType:
    """Returns the reduce op: NCCL averages; for other backends the sum is divided afterwards."""
    nccl = average and dist.get_backend(axis.group) == "nccl"
    return dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM


def _wait(work: dist.Work, result: torch.Tensor | None = None, divisor: int = 1) -> Finish:
    def finish() -> None:
        work.wait()
        if result is not None and divisor != 1:
            result.div_(divisor)

    return finish


def _gather(rows: Sequence[torch.Tensor], axis: Axis, kind: Kind, own: torch.Tensor) -> Finish:
    works = []
    for position in _others(axis):
        works += _receive(rows[position], axis, position, kind)
        works += _send(own, axis, position, kind)
    return lambda: _wait_all(works)


def _reduce(rows: Sequence[torch.Tensor], axis: Axis, kind: Kind, *, average: bool) -> Finish:
    own, others = rows[axis.position], _others(axis)
    # (ranks - 1, row), of the rows' dtype: what the others send, until it is added up
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
    """Returns the other ranks, beginning with the next, so that not all send to the same one."""
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
