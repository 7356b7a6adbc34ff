"""Collectives of a step, their bytes, and the time that all of it takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fsdp.simulate.constants import Constants, Link, link_of
from fsdp.simulate.mesh import MeshSize
from fsdp.simulate.schedule import Event, What
from fsdp.simulate.work import Work

__all__ = ["Collective", "StepTime", "collectives_of", "time_of"]

Op = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and number of ranks in a step.

    Attributes:
        op: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: that take part in each.
        count: how many there are.
        nbytes: of the buffers that are gathered, scattered or reduced.
        sent: bytes that a rank sends to others.
    """

    op: Op
    ranks: int
    count: int
    nbytes: int
    sent: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: of forward and backward.
        gather: waited for, what computing does not hide.
        reduce: likewise.
        update: the optimizer's.
        other: what slack adds.
        hidden: of collectives that ran while modules computed; no part of the total.
    """

    compute: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    update: float = 0.0
    other: float = 0.0
    hidden: float = 0.0

    @property
    def total(self) -> float:
        """Seconds."""
        return self.compute + self.gather + self.reduce + self.update + self.other


def collectives_of(step: Iterable[Event], mesh: MeshSize) -> tuple[Collective, ...]:
    """The collectives that ranks take part in; those of one rank are none."""
    found: dict[tuple[Op, int], Collective] = {}
    for event in step:
        for one in _issued(event, mesh):
            key = (one.op, one.ranks)
            if one.ranks > 1 and one.nbytes:
                before = found.get(key, Collective(one.op, one.ranks, 0, 0, 0))
                found[key] = replace(
                    one, count=before.count + 1, nbytes=before.nbytes + one.nbytes,
                    sent=before.sent + one.sent,
                )  # fmt: skip
    return tuple(found.values())


def time_of(
    step: Iterable[Event], mesh: MeshSize, constants: Constants, *, tensors: int, nbytes: int
) -> StepTime:
    """The time of a step, by the model that `constants` tells.

    Args:
        step: what happens.
        mesh: sizes.
        constants: of the machine.
        tensors: that the optimizer steps.
        nbytes: of them on a rank.
    """
    clock = _Clock(constants, mesh)
    for event in step:
        clock.run(event)
    update = constants.update
    told = replace(clock.spent, update=update.tensor * tensors + update.nbyte * nbytes)
    return replace(told, other=told.total * (constants.slack - 1))


class _Clock:
    """Two lanes: what computes, and what sends; `now` is the first one's time."""

    def __init__(self, constants: Constants, mesh: MeshSize) -> None:
        self._constants, self._mesh = constants, mesh
        self._now = self._sent = 0.0
        self._ends: dict[tuple[bool, object], float] = {}
        self.spent = StepTime()

    def run(self, event: Event) -> None:
        spent = self.spent
        if event.what is What.COMPUTE:
            seconds = _seconds(event.span.work, self._constants)
            self._now += seconds
            self.spent = replace(spent, compute=spent.compute + seconds)
            return
        key = (event.what in (What.REDUCE, What.REDUCED), event.group)
        last = event.what is What.REDUCED
        for one in _issued(event, self._mesh):
            taken = self._taken(one)
            if self._constants.overlap and not last:
                self._sent = max(self._now, self._sent) + taken
                self._ends[key] = self._sent
                self.spent = replace(self.spent, hidden=self.spent.hidden + taken)
            else:
                if last:
                    self._wait(key)
                self._waited(taken, reduction=key[0])
        if event.what in (What.GATHERED, What.REDUCED):
            self._wait(key)

    def _wait(self, key: tuple[bool, object]) -> None:
        wait = max(0.0, self._ends.pop(key, 0.0) - self._now)
        self._waited(wait, reduction=key[0])
        self.spent = replace(self.spent, hidden=self.spent.hidden - wait)

    def _waited(self, seconds: float, *, reduction: bool) -> None:
        self._now += seconds
        if reduction:
            self.spent = replace(self.spent, reduce=self.spent.reduce + seconds)
        else:
            self.spent = replace(self.spent, gather=self.spent.gather + seconds)

    def _taken(self, one: Collective) -> float:
        links = self._constants.links
        if one.op != "all_gather" and self._constants.reduce is not None:
            links = self._constants.reduce
        # Replicas lie a whole group apart from each other.
        link = link_of(links, self._mesh.ranks if one.op == "all_reduce" else one.ranks)
        return _alpha_beta(link, one)


def _alpha_beta(link: Link, one: Collective) -> float:
    messages = (one.ranks - 1) * (2 if one.op == "all_reduce" else 1)
    return messages * link.alpha + one.sent * link.beta


def _seconds(work: Work, constants: Constants) -> float:
    per = constants.compute
    return work.flops * per.flop + work.nbytes * per.nbyte + work.ops * per.op


def _issued(event: Event, mesh: MeshSize) -> list[Collective]:
    """What an event sends."""
    group = event.group
    if group is None:
        return []
    dtypes = group.dtypes
    if event.what is What.GATHER:
        return [_one("all_gather", event.near or mesh.shard, group.buffer_bytes(dtypes.compute))]
    if event.what is What.REDUCE:
        return [_one("reduce_scatter", mesh.shard, group.buffer_bytes(dtypes.reduce))]
    if event.what is What.REDUCED and mesh.replicate > 1:
        return [_one("all_reduce", mesh.replicate, group.shard_bytes(dtypes.reduce))]
    return []


def _one(op: Op, ranks: int, nbytes: int) -> Collective:
    times = 2 if op == "all_reduce" else 1
    return Collective(op, ranks, 1, nbytes, times * (nbytes - nbytes // ranks))
