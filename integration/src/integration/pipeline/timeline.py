"""Records the actions of a rank's stages in a step, and replays those of all ranks on a timeline.

Actions are forwards and backwards. They are replayed in the recorded order with the measured
durations, with a processor for each rank and free communication: an action starts when its rank has
finished the previous action and the neighbouring stages have produced its inputs.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from integration.pipeline.schedules import PipelineSchedule
from integration.pipeline.stage import Stage

FORWARD = "F"
BACKWARD = "B"
BACKWARD_OF_INPUTS = "I"
BACKWARD_OF_WEIGHTS = "W"


@dataclass(frozen=True)
class Action:
    """A forward or backward of one microbatch through one stage.

    Attributes:
        seconds: CPU time of the thread, which excludes waiting for other ranks and processes.
    """

    kind: str
    stage: int
    microbatch: int
    seconds: float


class TimedStage(Stage):
    """A `Stage` that appends its actions to ``log``, a list shared by a rank's stages."""

    log: list[Action]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs and records a forward."""
        started = time.thread_time()
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._record(FORWARD, fwd_chunk_id, started)
        return result

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Runs and records a backward, either full or of the stage's inputs only."""
        started = time.thread_time()
        result = super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )
        self._record(BACKWARD if full_backward else BACKWARD_OF_INPUTS, bwd_chunk_id, started)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs and records a backward of weights."""
        started = time.thread_time()
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._record(BACKWARD_OF_WEIGHTS, bwd_chunk_id, started)
        return result

    def _record(self, kind: str, microbatch: int, started: float) -> None:
        # On the CPU autograd runs in the calling thread.
        seconds = time.thread_time() - started
        self.log.append(Action(kind, self.stage_index, microbatch, seconds))


@dataclass(frozen=True)
class ActionSpan:
    """An action on the timeline of a rank, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float

    @property
    def end(self) -> float:
        """End of the action."""
        return self.start + self.action.seconds


@dataclass(frozen=True)
class Timeline:
    """All actions of one step on all ranks."""

    spans: tuple[ActionSpan, ...]
    ranks: int

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time."""
        busy = sum(span.action.seconds for span in self.spans)
        return 1 - busy / (self.ranks * self.seconds)


def median_step(steps: Sequence[Sequence[Action]]) -> list[Action]:
    """Returns a rank's actions of a step, with the median duration of each kind and stage.

    Args:
        steps: the same actions in the same order, several times.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    for action in (action for step in steps for action in step):
        durations.setdefault((action.kind, action.stage), []).append(action.seconds)
    medians = {key: median(seconds) for key, seconds in durations.items()}
    return [replace(each, seconds=medians[each.kind, each.stage]) for each in steps[0]]


_KINDS = {
    "FORWARD": FORWARD,
    "FULL_BACKWARD": BACKWARD,
    "BACKWARD_INPUT": BACKWARD_OF_INPUTS,
    "BACKWARD_WEIGHT": BACKWARD_OF_WEIGHTS,
}


def schedule_orders(
    schedule: PipelineSchedule, ranks: int, microbatches: int, seconds: Mapping[str, float]
) -> list[list[Action]]:
    """Returns the actions of each rank in the order of torch's schedule, without running a model.

    It makes a fake process group, so none may exist.

    Args:
        schedule: on as few stages as it supports.
        ranks: of the pipeline.
        microbatches: of a step.
        seconds: the duration of each kind of action, the same on every stage.
    """
    from testkit import fake_mesh

    count = schedule.stages(ranks, None)
    with fake_mesh((ranks,), ("pp",)) as mesh:
        stages = [
            PipelineStage(
                torch.nn.Identity(), index, count, torch.device("cpu"), group=mesh.get_group()
            )
            for index in schedule.stages_of(0, ranks, count)
        ]
        built = schedule.build(stages, microbatches, lambda out, y: (out - y).sum())
    orders: list[list[Action]] = []
    for _, actions in sorted(built.pipeline_order.items()):
        done: Counter[str] = Counter()
        order: list[Action] = []
        for each in (part for one in actions if one for part in (one.sub_actions or (one,))):
            if kind := _KINDS.get(each.computation_type.name):
                # In torch's own order of 1F1B the last rank's forwards are numbered from 1.
                in_turn = schedule.stages_per_rank == 1
                microbatch = done[kind] if in_turn else each.microbatch_index
                order.append(Action(kind, each.stage_index, microbatch, seconds[kind]))
                done[kind] += 1
        orders.append(order)
    return orders


def replay(orders: Sequence[Sequence[Action]]) -> Timeline:
    """Returns the timeline in which each action of each rank runs as early as it can.

    Args:
        orders: actions by rank.

    Raises:
        ValueError: the order is a deadlock.
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    ended: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * len(orders), [0] * len(orders)
    spans: list[ActionSpan] = []
    while len(spans) < sum(map(len, orders)):
        before = len(spans)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                needed = _needed(action, stages)
                if any(key not in ended for key in needed):
                    break
                start = max([free[rank], *(ended[key] for key in needed)])
                spans.append(ActionSpan(rank, action, start))
                free[rank] = start + action.seconds
                ended[_key(action)] = free[rank]
                position[rank] += 1
        if len(spans) == before:
            raise ValueError(
                "replay: expected an order that can run, got a deadlock, in which each rank waits"
                " for another; record the actions of one step"
            )
    return Timeline(tuple(spans), len(orders))


def _key(action: Action) -> tuple[str, int, int]:
    """Returns the key of an action's result: outputs, gradients of inputs, or of weights."""
    kind = action.kind if action.kind in (FORWARD, BACKWARD_OF_WEIGHTS) else "gradient"
    return kind, action.stage, action.microbatch


def _needed(action: Action, stages: int) -> list[tuple[str, int, int]]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == FORWARD:
        return [(FORWARD, stage - 1, microbatch)] if stage else []
    if action.kind == BACKWARD_OF_WEIGHTS:
        return [("gradient", stage, microbatch)]
    needed = [(FORWARD, stage, microbatch)]
    if stage + 1 < stages:
        needed.append(("gradient", stage + 1, microbatch))
    return needed
