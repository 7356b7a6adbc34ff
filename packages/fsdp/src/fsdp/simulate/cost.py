"""The collectives of a step, their bytes, and the time of the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fsdp.simulate.machine import Constants, Link, MeshSize, find_link
from fsdp.simulate.schedule import EventKind, ScheduledEvent
from fsdp.simulate.tracing import ComputeWork

__all__ = ["Collective", "StepTime", "collectives_of", "time_of"]

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Collective:
    """All collectives of a step with the same operation and number of ranks.

    Attributes:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: number of ranks in each.
        count: number of collectives.
        nbytes: total bytes of the buffers that are gathered, scattered or reduced.
        sent: total bytes that a rank sends to others.
    """

    op: Op
    ranks: int
    count: int
    nbytes: int
    sent: int


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
        compute: forward and backward.
        gather: waiting for all-gathers that computation does not hide.
        reduce: waiting for reductions that computation does not hide.
        update: the optimizer's step.
        other: what `Constants.slack` adds.
        hidden: collectives that ran while modules computed; not part of the total.
    """

    compute: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    update: float = 0.0
    other: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.gather + self.reduce + self.update + self.other


def collectives_of(step: Iterable[ScheduledEvent], mesh: MeshSize) -> tuple[Collective, ...]:
    """Returns the collectives of a step, without those of a single rank."""
    totals: dict[tuple[Op, int], Collective] = {}
    for event in step:
        for one in _issued(event, mesh):
            key = (one.op, one.ranks)
            if one.ranks > 1 and one.nbytes:
                before = totals.get(key, Collective(one.op, one.ranks, 0, 0, 0))
                totals[key] = replace(
                    one, count=before.count + 1, nbytes=before.nbytes + one.nbytes,
                    sent=before.sent + one.sent,
                )  # fmt: skip
    return tuple(totals.values())


def time_of(
    step: Iterable[ScheduledEvent],
    mesh: MeshSize,
    constants: Constants,
    *,
    tensors: int,
    nbytes: int,
) -> StepTime:
    """Predicts the time of a step by the model that `fsdp.simulate.machine` describes.

    Args:
        step: events of the step.
        mesh: sizes of the mesh.
        constants: constants of the machine.
        tensors: number of parameters that the optimizer updates.
        nbytes: bytes of a rank's shards of them.
    """
    clock = _Clock(constants, mesh)
    for event in step:
        clock.advance(event)
    update = constants.update
    time = replace(clock.time, update=update.tensor * tensors + update.nbyte * nbytes)
    return replace(time, other=time.total * (constants.slack - 1))


class _Clock:
    """Replays a step on two streams, one that computes and one that communicates."""

    def __init__(self, constants: Constants, mesh: MeshSize) -> None:
        self._constants, self._mesh = constants, mesh
        self._now = self._communicated = 0.0  # of the stream that computes, and the other
        self._ends: dict[tuple[bool, object], float] = {}
        self.time = StepTime()

    def advance(self, event: ScheduledEvent) -> None:
        """Adds the time of an event."""
        time = self.time
        if event.kind is EventKind.COMPUTE:
            seconds = _compute_seconds(event.segment.work, self._constants)
            self._now += seconds
            self.time = replace(time, compute=time.compute + seconds)
            return
        is_reduction = event.kind in (EventKind.REDUCE_SCATTER, EventKind.REDUCE_SCATTER_WAIT)
        key = (is_reduction, event.group)
        # The all-reduce of HSDP, which starts when the reduce-scatter has ended.
        is_blocking = event.kind is EventKind.REDUCE_SCATTER_WAIT
        for one in _issued(event, self._mesh):
            seconds = self._collective_seconds(one)
            if self._constants.overlap and not is_blocking:
                self._communicated = max(self._now, self._communicated) + seconds
                self._ends[key] = self._communicated
                self.time = replace(self.time, hidden=self.time.hidden + seconds)
            else:
                if is_blocking:
                    self._wait(key)
                self._add_waiting(seconds, is_reduction=is_reduction)
        if event.kind in (EventKind.ALL_GATHER_WAIT, EventKind.REDUCE_SCATTER_WAIT):
            self._wait(key)

    def _wait(self, key: tuple[bool, object]) -> None:
        wait = max(0.0, self._ends.pop(key, 0.0) - self._now)
        self._add_waiting(wait, is_reduction=key[0])
        self.time = replace(self.time, hidden=self.time.hidden - wait)

    def _add_waiting(self, seconds: float, *, is_reduction: bool) -> None:
        self._now += seconds
        if is_reduction:
            self.time = replace(self.time, reduce=self.time.reduce + seconds)
        else:
            self.time = replace(self.time, gather=self.time.gather + seconds)

    def _collective_seconds(self, one: Collective) -> float:
        links = self._constants.links
        if one.op != "all_gather" and self._constants.reduce is not None:
            links = self._constants.reduce
        # Ranks that replicate each other are not neighbours: they are spread over the whole mesh.
        link = find_link(links, self._mesh.ranks if one.op == "all_reduce" else one.ranks)
        return _alpha_beta(link, one)


def _alpha_beta(link: Link, one: Collective) -> float:
    messages = (one.ranks - 1) * (2 if one.op == "all_reduce" else 1)
    return messages * link.alpha + one.sent * link.beta


def _compute_seconds(work: ComputeWork, constants: Constants) -> float:
    per = constants.compute
    return work.flops * per.flop + work.nbytes * per.nbyte + work.ops * per.op


def _issued(event: ScheduledEvent, mesh: MeshSize) -> list[Collective]:
    """Returns the collective that an event starts, if any."""
    group = event.group
    if group is None:
        return []
    dtypes = group.dtypes
    if event.kind is EventKind.ALL_GATHER:
        ranks = event.subgroup_size or mesh.shard
        return [_one("all_gather", ranks, group.buffer_bytes(dtypes.compute))]
    if event.kind is EventKind.REDUCE_SCATTER:
        return [_one("reduce_scatter", mesh.shard, group.buffer_bytes(dtypes.reduce))]
    if event.kind is EventKind.REDUCE_SCATTER_WAIT and mesh.replicate > 1:
        return [_one("all_reduce", mesh.replicate, group.shard_bytes(dtypes.reduce))]
    return []


def _one(op: Op, ranks: int, nbytes: int) -> Collective:
    times = 2 if op == "all_reduce" else 1
    return Collective(op, ranks, 1, nbytes, times * (nbytes - nbytes // ranks))
