"""Warns of sharding decisions that take longer than they should."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable

_seconds = 2.0
_slow: Counter[str] = Counter()
_warned: set[str] = set()


def set_planning_budget(seconds: float) -> None:
    """Sets how long one sharding decision may take before it is counted and warned of.

    A decision is made once for each operator, placements and shapes, and is cached then. One that
    takes longer is a ``slow`` one in `stats`; the first of each operator is a `RuntimeWarning` with
    its placements and mesh.

    Args:
        seconds: of processor time, 2 by default; ``math.inf`` for no budget.

    Raises:
        ValueError: it is below 0, or no number.
    """
    global _seconds
    if not seconds >= 0:
        raise ValueError(f"set_planning_budget: expected seconds of at least 0, got {seconds}")
    _seconds = seconds


def check(name: str, seconds: float, describe: Callable[[], str]) -> None:
    """Counts a decision that took longer than the budget, and warns of an operator's first.

    Args:
        name: of the operator.
        seconds: of processor time that the decision took.
        describe: returns the call with its placements and mesh.
    """
    if seconds <= _seconds:
        return
    _slow[name] += 1
    if name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"planning {describe()} took {seconds:.1f} s, expected at most {_seconds:g} s "
        f"(dtensor_rules.set_planning_budget). Its plan is cached; other placements and shapes are "
        f"planned again. To avoid that, redistribute the inputs to placements that the operator "
        f"takes as they are, or make the plan with dtensor_rules.register_rule. Further calls of "
        f"{name} are only counted, in dtensor_rules.stats().",
        RuntimeWarning,
        stacklevel=2,
    )


def slow_decisions(name: str) -> int:
    """Returns how many decisions for an operator took longer than the budget."""
    return _slow[name]


def clear() -> None:
    """Sets the counts back to 0, and lets every operator be warned of again."""
    _slow.clear()
    _warned.clear()
