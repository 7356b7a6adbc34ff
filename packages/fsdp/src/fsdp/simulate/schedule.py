"""What happens in a step, in order: gathers, computing, reductions, and what is freed when.

It is what `fsdp.state`, `prefetch` and `context` do, as a list; memory and time are counted from
the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fsdp.simulate.units import Group
from fsdp.simulate.work import Mark, Moment, Span

__all__ = ["Event", "Reshard", "What", "events"]


class What(Enum):
    """What happens."""

    COMPUTE = auto()
    GATHER = auto()
    GATHERED = auto()
    RESHARD = auto()
    TAKE = auto()
    REDUCE = auto()
    REDUCED = auto()


@dataclass(frozen=True)
class Event:
    """One thing that happens.

    Attributes:
        what: it is.
        group: whose; None of computing.
        span: what is computed; else empty.
        near: of a gather, from how many ranks if not from all that shard; of a reshard, over how
            many the group is cut if not over all.
    """

    what: What
    group: Group | None = None
    span: Span = field(default_factory=Span)
    near: int | None = None


@dataclass(frozen=True)
class Reshard:
    """What becomes of parameters between forward and backward.

    Attributes:
        units: whether those of units are let go.
        model: whether those of the model's own group are.
        near: over how many ranks they are cut meanwhile, None for all.
    """

    units: bool
    model: bool
    near: int | None


def events(marks: Sequence[Mark], groups: Sequence[Group], reshard: Reshard) -> Iterator[Event]:
    """The step of every rank."""
    return _Step(marks, groups, reshard).run()


class _Step:
    def __init__(self, marks: Sequence[Mark], groups: Sequence[Group], reshard: Reshard) -> None:
        self._marks, self._reshard = marks, reshard
        self._of: dict[int, list[Group]] = {}
        for group in groups:
            self._of.setdefault(group.unit, []).append(group)
        self._entered = [mark.unit for mark in marks if mark.moment is Moment.ENTER]
        self._left = [mark.unit for mark in marks if mark.moment is Moment.LEAVE]
        self._gathering: set[Group] = set()
        self._unsharded: set[Group] = set()
        self._in_flight: Group | None = None

    def run(self) -> Iterator[Event]:
        places = iter(range(len(self._entered)))
        for mark in self._marks:
            yield Event(What.COMPUTE, span=mark.before)
            unit = mark.unit
            match mark.moment:
                case Moment.ENTER:
                    place = next(places)
                    yield from self._unshard(unit, None)
                    yield from self._start(self._entered[place + 1 : place + 2], None)
                case Moment.LEAVE:
                    if self._reshard.units if unit else self._reshard.model:
                        yield from self._let_go(unit, self._reshard.near)
                case Moment.ENTER_BACKWARD:
                    near = self._reshard.near
                    yield from self._unshard(unit, near)
                    place = self._left.index(unit)
                    yield from self._start(self._left[max(place - 1, 0) : place], near)
                case Moment.LEAVE_BACKWARD:
                    for group in self._of.get(unit, []):
                        yield from self._let_go_one(group, None)
                        yield from self._reduce(group)
        yield from self._finish()

    def _start(self, units: Sequence[int], near: int | None) -> Iterator[Event]:
        for unit in units:
            for group in self._of.get(unit, []):
                if group not in self._unsharded | self._gathering:
                    self._gathering.add(group)
                    yield Event(What.GATHER, group, near=near)

    def _unshard(self, unit: int, near: int | None) -> Iterator[Event]:
        yield from self._start([unit], near)
        for group in self._of.get(unit, []):
            if group in self._gathering:
                self._gathering.remove(group)
                self._unsharded.add(group)
                yield Event(What.GATHERED, group)

    def _let_go(self, unit: int, near: int | None) -> Iterator[Event]:
        for group in self._of.get(unit, []):
            yield from self._let_go_one(group, near)

    def _let_go_one(self, group: Group, near: int | None) -> Iterator[Event]:
        if group in self._unsharded:
            self._unsharded.remove(group)
            yield Event(What.RESHARD, group, near=near)

    def _reduce(self, group: Group) -> Iterator[Event]:
        yield from self._finish()
        if group.trained:
            yield Event(What.TAKE, group)
            yield Event(What.REDUCE, group)
            self._in_flight = group

    def _finish(self) -> Iterator[Event]:
        if self._in_flight is not None:
            yield Event(What.REDUCED, self._in_flight)
            self._in_flight = None
