"""The events of a step in order: computation, collectives, copies, and when buffers are freed.

It repeats the schedule of fsdp's runtime (all-gathers, prefetching, resharding and reductions) as a
list of events, from which memory, collectives and time are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fsdp.simulate.tracing import FSDPHook, HookEvent, Segment
from fsdp.simulate.units import PlannedGroup

__all__ = ["EventKind", "ReshardPolicy", "ScheduledEvent", "schedule_step"]


class EventKind(Enum):
    """What happens at an event."""

    COMPUTE = auto()
    ALL_GATHER = auto()
    ALL_GATHER_WAIT = auto()
    RESHARD = auto()
    COPY_IN = auto()
    REDUCE_SCATTER = auto()
    REDUCE_SCATTER_WAIT = auto()


@dataclass(frozen=True)
class ScheduledEvent:
    """An event of a step.

    Attributes:
        kind: what happens.
        group: the parameter group; None for computation.
        segment: the computation; empty for other events.
        subgroup_size: for an all-gather, the number of ranks it gathers from; for a reshard, the
            number of ranks over which the group is sharded then; None for all ranks that shard.
    """

    kind: EventKind
    group: PlannedGroup | None = None
    segment: Segment = field(default_factory=Segment)
    subgroup_size: int | None = None


@dataclass(frozen=True)
class ReshardPolicy:
    """Which parameters are resharded after forward.

    Attributes:
        units: whether the parameters of units are.
        model: whether the parameters of the model's own unit are.
        subgroup_size: number of ranks over which they are sharded between forward and backward;
            None for all ranks that shard.
    """

    units: bool
    model: bool
    subgroup_size: int | None


def schedule_step(
    hook_events: Sequence[HookEvent], groups: Sequence[PlannedGroup], reshard: ReshardPolicy
) -> Iterator[ScheduledEvent]:
    """Returns the events of a step, the same on every rank.

    Args:
        hook_events: the hooks of the step and the computation between them.
        groups: the parameter groups of all units.
        reshard: what is resharded after forward.
    """
    return _StepScheduler(hook_events, groups, reshard).run()


class _StepScheduler:
    def __init__(
        self,
        hook_events: Sequence[HookEvent],
        groups: Sequence[PlannedGroup],
        reshard: ReshardPolicy,
    ) -> None:
        self._hook_events, self._reshard_policy = hook_events, reshard
        self._groups: dict[int, list[PlannedGroup]] = {}
        for group in groups:
            self._groups.setdefault(group.unit, []).append(group)
        self._pre_forward_order = _order(hook_events, FSDPHook.PRE_FORWARD)
        self._post_forward_order = _order(hook_events, FSDPHook.POST_FORWARD)
        self._gathering: set[PlannedGroup] = set()
        self._unsharded: set[PlannedGroup] = set()
        self._reducing: PlannedGroup | None = None

    def run(self) -> Iterator[ScheduledEvent]:
        positions = iter(range(len(self._pre_forward_order)))
        subgroup_size = self._reshard_policy.subgroup_size
        for event in self._hook_events:
            yield ScheduledEvent(EventKind.COMPUTE, segment=event.before)
            unit = event.unit
            match event.hook:
                case FSDPHook.PRE_FORWARD:
                    position = next(positions)
                    yield from self._unshard(unit, None)
                    following = self._pre_forward_order[position + 1 : position + 2]
                    yield from self._all_gather(following, None)
                case FSDPHook.POST_FORWARD:
                    if self._reshard_policy.units if unit else self._reshard_policy.model:
                        yield from self._reshard_unit(unit, subgroup_size)
                case FSDPHook.PRE_BACKWARD:
                    yield from self._unshard(unit, subgroup_size)
                    position = self._post_forward_order.index(unit)
                    previous = self._post_forward_order[max(position - 1, 0) : position]
                    yield from self._all_gather(previous, subgroup_size)
                case FSDPHook.POST_BACKWARD:
                    for group in self._groups.get(unit, []):
                        yield from self._reshard(group, None)
                        yield from self._reduce_scatter(group)
        yield from self._wait_for_reduction()

    def _all_gather(
        self, units: Sequence[int], subgroup_size: int | None
    ) -> Iterator[ScheduledEvent]:
        for unit in units:
            for group in self._groups.get(unit, []):
                if group not in self._unsharded | self._gathering:
                    self._gathering.add(group)
                    yield ScheduledEvent(EventKind.ALL_GATHER, group, subgroup_size=subgroup_size)

    def _unshard(self, unit: int, subgroup_size: int | None) -> Iterator[ScheduledEvent]:
        yield from self._all_gather([unit], subgroup_size)
        for group in self._groups.get(unit, []):
            if group in self._gathering:
                self._gathering.remove(group)
                self._unsharded.add(group)
                yield ScheduledEvent(EventKind.ALL_GATHER_WAIT, group)

    def _reshard_unit(self, unit: int, subgroup_size: int | None) -> Iterator[ScheduledEvent]:
        for group in self._groups.get(unit, []):
            yield from self._reshard(group, subgroup_size)

    def _reshard(self, group: PlannedGroup, subgroup_size: int | None) -> Iterator[ScheduledEvent]:
        if group in self._unsharded:
            self._unsharded.remove(group)
            yield ScheduledEvent(EventKind.RESHARD, group, subgroup_size=subgroup_size)

    def _reduce_scatter(self, group: PlannedGroup) -> Iterator[ScheduledEvent]:
        yield from self._wait_for_reduction()
        if group.trained:
            yield ScheduledEvent(EventKind.COPY_IN, group)
            yield ScheduledEvent(EventKind.REDUCE_SCATTER, group)
            self._reducing = group

    def _wait_for_reduction(self) -> Iterator[ScheduledEvent]:
        if self._reducing is not None:
            yield ScheduledEvent(EventKind.REDUCE_SCATTER_WAIT, self._reducing)
            self._reducing = None


def _order(hook_events: Sequence[HookEvent], hook: FSDPHook) -> list[int]:
    """Returns the units in the order of one of their hooks."""
    return [event.unit for event in hook_events if event.hook is hook]
