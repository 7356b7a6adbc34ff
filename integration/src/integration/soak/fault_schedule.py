"""Which rank is disturbed when, and how."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# `rank.py` has ranks raise at SIGUSR1, whose default would end them without a word.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
KINDS = tuple(SIGNALS)


@dataclass(frozen=True)
class Fault:
    """What befalls a rank.

    Attributes:
        step: completed steps behind which it comes.
        rank: whom.
        kind: one of ``KINDS``.
    """

    step: int
    rank: int
    kind: str


def draw_fault_schedule(
    *, steps: int, every: int, ranks: int, kinds: Sequence[str], seed: int
) -> list[Fault]:
    """Return a fault for each multiple of ``every`` before ``steps``, in order.

    Ranks are drawn one by one; kinds without replacement until all have been, so that none is left
    out by chance.
    """
    generator = random.Random(seed)
    fault_schedule: list[Fault] = []
    bag: list[str] = []
    for step in range(every, steps, every):
        if not bag:
            bag = generator.sample(kinds, len(kinds))
        fault_schedule.append(Fault(step, generator.randrange(ranks), bag.pop()))
    return fault_schedule
