"""The collectives of a step, their bytes, and the time of the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp.collectives.stages import GroupStage
from fsdp.simulate.events import CommEvent, ComputeWork, StageEvent, StepEvent
from fsdp.simulate.machine import Constants, Link, MeshSize, find_link

__all__ = ["Collective", "StepTime", "collectives_of", "time_of"]

_OVERLAPPING = (GroupStage.ALL_GATHER, GroupStage.REDUCE_SCATTER)


@dataclass(frozen=True)
class Collective:
    """All collectives of a step with the same operation and number of ranks.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce", or that of another package.
        ranks: number of ranks in each.
        count: number of collectives.
        nbytes: total bytes of the buffers that are gathered, scattered or reduced.
        sent: total bytes that a rank sends to others.
    """

    op: str
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


def collectives_of(step: Iterable[StepEvent]) -> tuple[Collective, ...]:
    """Returns the collectives of a step, without those of a single rank."""
    totals: dict[tuple[str, int], Collective] = {}
    for one in filter(None, map(_collective, _with_exchanges_joined(step))):
        before = totals.get((one.op, one.ranks), Collective(one.op, one.ranks, 0, 0, 0))
        totals[one.op, one.ranks] = replace(
            one, count=before.count + 1, nbytes=before.nbytes + one.nbytes,
            sent=before.sent + one.sent,
        )  # fmt: skip
    return tuple(totals.values())


def time_of(
    step: Iterable[StepEvent],
    mesh: MeshSize,
    constants: Constants,
    *,
    tensors: int,
    nbytes: int,
    replicas: str = "",
) -> StepTime:
    """Predicts the time of a step by the model that `fsdp.simulate.machine` describes.

    Args:
        step: events of the step.
        mesh: sizes of the mesh.
        constants: constants of the machine.
        tensors: number of parameters that the optimizer updates.
        nbytes: bytes of a rank's shards of them.
        replicas: name of the process group of replicas, if there are any.
    """
    clock = _Clock(constants, mesh, replicas)
    for event in _with_exchanges_joined(step):
        clock.advance(event)
    update = constants.update
    time = replace(clock.time, update=update.tensor * tensors + update.nbyte * nbytes)
    return replace(time, other=time.total * (constants.slack - 1))


class _Clock:
    """Replays a step on two streams, one that computes and one that communicates."""

    def __init__(self, constants: Constants, mesh: MeshSize, replicas: str) -> None:
        self._constants, self._mesh, self._replicas = constants, mesh, replicas
        self._now = self._communicated = 0.0  # of the stream that computes, and the other
        self._ends: dict[int, float] = {}  # of a group's all-gather or reduction
        self.time = StepTime()

    def advance(self, event: StepEvent) -> None:
        """Adds the time of an event."""
        if isinstance(event, ComputeWork):
            seconds = _compute_seconds(event, self._constants)
            self._now += seconds
            self.time = replace(self.time, compute=self.time.compute + seconds)
        elif isinstance(event, CommEvent):
            self._communicate(event)
        elif event.stage in (GroupStage.ALL_GATHER_WAIT, GroupStage.REDUCE_SCATTER_WAIT):
            self._wait(event)

    def _communicate(self, event: CommEvent) -> None:
        one, during = _collective(event), event.during
        if one is None:
            return
        seconds = self._collective_seconds(one, over_replicas=event.group == self._replicas)
        is_async = during is not None and during.stage in _OVERLAPPING
        if during is not None and is_async and self._constants.overlap:
            self._communicated = max(self._now, self._communicated) + seconds
            self._ends[during.collective] = self._communicated
            self.time = replace(self.time, hidden=self.time.hidden + seconds)
            return
        if during is not None and not is_async:
            # What follows the reduce-scatter when it has ended: the reduction over replicas, and
            # the gather of replicated gradients.
            self._wait(during)
        is_gradient = during is not None and during.stage is GroupStage.GATHER_GRADS
        is_reduction = is_gradient or one.op in ("reduce_scatter", "all_reduce")
        self._add_waiting(seconds, is_reduction=is_reduction)

    def _wait(self, event: StageEvent) -> None:
        wait = max(0.0, self._ends.pop(event.collective, 0.0) - self._now)
        self._add_waiting(wait, is_reduction=event.stage is not GroupStage.ALL_GATHER_WAIT)
        self.time = replace(self.time, hidden=self.time.hidden - wait)

    def _add_waiting(self, seconds: float, *, is_reduction: bool) -> None:
        self._now += seconds
        if is_reduction:
            self.time = replace(self.time, reduce=self.time.reduce + seconds)
        else:
            self.time = replace(self.time, gather=self.time.gather + seconds)

    def _collective_seconds(self, one: Collective, *, over_replicas: bool) -> float:
        links = self._constants.links
        if one.op != "all_gather" and self._constants.reduce is not None:
            links = self._constants.reduce
        # Ranks that replicate each other are not neighbours: they are spread over the whole mesh.
        link = find_link(links, self._mesh.ranks if over_replicas else one.ranks)
        return _alpha_beta(link, one)


def _alpha_beta(link: Link, one: Collective) -> float:
    messages = (one.ranks - 1) * (2 if one.op == "all_reduce" else 1)
    return messages * link.alpha + one.sent * link.beta


def _compute_seconds(work: ComputeWork, constants: Constants) -> float:
    per = constants.compute
    return work.flops * per.flop + work.nbytes * per.nbyte + work.ops * per.op


def _with_exchanges_joined(step: Iterable[StepEvent]) -> Iterator[StepEvent]:
    """Yields the events of a step; sends and receives within a stage are one collective."""
    sends: list[CommEvent] = []
    for event in step:
        if isinstance(event, CommEvent) and event.during and event.op in ("send", "recv"):
            if sends and event.group != sends[0].group:  # HFSDP: over replicas, then over shards
                yield _joined(sends)
                sends = []
            sends += [event] if event.op == "send" else []
            continue
        if sends:
            yield _joined(sends)
            sends = []
        yield event


def _joined(sends: Sequence[CommEvent]) -> CommEvent:
    """Returns the collective that a buffer has made of sends to all other ranks."""
    first, sent = sends[0], sum(one.input_bytes for one in sends)
    assert first.during is not None
    stage, ranks = first.during.stage, first.ranks
    nbytes = sent * ranks // (ranks - 1)
    if stage in (GroupStage.ALL_GATHER, GroupStage.GATHER_GRADS):
        return replace(first, op="all_gather", input_bytes=nbytes // ranks, output_bytes=nbytes)
    if stage is GroupStage.REDUCE_SCATTER or len(sends) == ranks - 1:
        return replace(first, op="reduce_scatter", output_bytes=nbytes // ranks, input_bytes=nbytes)
    # Of HSDP's replicas: a reduce-scatter, and then an all-gather.
    return replace(first, op="all_reduce", input_bytes=nbytes // 2, output_bytes=nbytes // 2)


def _collective(event: StepEvent) -> Collective | None:
    """Returns the collective of an event; None if it is none or nothing is sent."""
    if not isinstance(event, CommEvent):
        return None
    nbytes = max(event.input_bytes, event.output_bytes)
    if event.op == "send":
        return Collective(event.op, event.ranks, 1, nbytes, nbytes)
    if not nbytes or event.op == "recv":
        return None
    times = 2 if event.op == "all_reduce" else 1
    return Collective(event.op, event.ranks, 1, nbytes, times * (nbytes - nbytes // event.ranks))
