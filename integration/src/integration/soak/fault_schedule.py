"""Draws which rank gets which fault after which step."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# `rank.py` raises on SIGUSR1, which by default ends a process without a message.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
KINDS = tuple(SIGNALS)


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    Attributes:
        step: number of completed steps after which it is injected.
        rank: the rank.
        kind: one of ``KINDS``.
    """

    step: int
    rank: int
    kind: str


def draw_fault_schedule(
    *, steps: int, every: int, ranks: int, kinds: Sequence[str], seed: int
) -> list[Fault]:
    """Returns a fault for each multiple of ``every`` before ``steps``, in order.

    Ranks are drawn independently; kinds are drawn without replacement until all have occurred, so
    that none is left out by chance.
    """
    generator = random.Random(seed)
    fault_schedule: list[Fault] = []
    bag: list[str] = []
    for step in range(every, steps, every):
        if not bag:
            bag = generator.sample(kinds, len(kinds))
        fault_schedule.append(Fault(step, generator.randrange(ranks), bag.pop()))
    return fault_schedule
