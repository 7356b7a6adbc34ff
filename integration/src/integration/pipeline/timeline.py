"""When every action of a step would run, had each rank a processor of its own and sending no cost.

The order is what the ranks did, the durations what they took; an action begins when its rank has
ended the one before and the neighbouring stage has what it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from integration.pipeline.actions import BACKWARD_OF_WEIGHTS, FORWARD, Action


@dataclass(frozen=True)
class ActionSpan:
    """An action on a rank's line of time, in seconds from the step's beginning."""

    rank: int
    action: Action
    start: float

    @property
    def end(self) -> float:
        """When the action has ended."""
        return self.start + self.action.seconds


@dataclass(frozen=True)
class Timeline:
    """All actions of one step on all ranks."""

    spans: tuple[ActionSpan, ...]
    ranks: int

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        busy = sum(span.action.seconds for span in self.spans)
        return 1 - busy / (self.ranks * self.seconds)


def steady(steps: Sequence[Sequence[Action]]) -> list[Action]:
    """Return a rank's actions of a step, each with the median of its kind on its stage.

    Args:
        steps: the same actions in the same order, several times.
    """
    durations: dict[tuple[str, int], list[float]] = {}
    for action in (action for step in steps for action in step):
        durations.setdefault((action.kind, action.stage), []).append(action.seconds)
    typical = {key: median(seconds) for key, seconds in durations.items()}
    return [replace(each, seconds=typical[each.kind, each.stage]) for each in steps[0]]


def replay(orders: Sequence[Sequence[Action]]) -> Timeline:
    """Lay the actions of all ranks out in time, each as early as it can run.

    Args:
        orders: by rank.

    Raises:
        ValueError: actions wait for each other in a circle.
    """
    stages = 1 + max(action.stage for order in orders for action in order)
    ended: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * len(orders), [0] * len(orders)
    spans: list[ActionSpan] = []
    while len(spans) < sum(map(len, orders)):
        before = len(spans)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                action = order[at[rank]]
                needed = _needed(action, stages)
                if any(key not in ended for key in needed):
                    break
                start = max([free[rank], *(ended[key] for key in needed)])
                spans.append(ActionSpan(rank, action, start))
                free[rank] = start + action.seconds
                ended[_key(action)] = free[rank]
                at[rank] += 1
        if len(spans) == before:
            raise ValueError("the order of actions cannot run: each rank waits for another")
    return Timeline(tuple(spans), len(orders))


def _key(action: Action) -> tuple[str, int, int]:
    """What an action's end makes available: outputs, gradients of inputs, or of weights."""
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
