"""What happened to the calls: counts per operator, and the state of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from dtensor_rules import _compat, _core
from dtensor_rules.planning import budget, inference


@dataclass(frozen=True)
class OpStats:
    """The calls of one operator since the counts were cleared.

    Attributes:
        rule: how many ran a plan that a rule had made.
        cache: how many ran a plan that torch's propagation had made.
        miss: how many had to make their plan first, and ran it.
        fallthrough: how many were torch's, by reason.
        slow: how many plans took longer to make than `set_planning_budget` says.
    """

    rule: int
    cache: int
    miss: int
    fallthrough: dict[str, int]
    slow: int = 0


@dataclass(frozen=True)
class CacheInfo:
    """The cache of plans, as `functools.lru_cache` describes its own.

    Attributes:
        hits: lookups that found a plan.
        misses: lookups that did not.
        evictions: plans that made room for others.
        size: plans in it now.
        capacity: plans it can hold.
        specs: different DTensorSpecs that are interned.
    """

    hits: int
    misses: int
    evictions: int
    size: int
    capacity: int
    specs: int


def stats() -> dict[str, OpStats]:
    """Returns the counts of every called operator by its name, as ``aten.add.Tensor``."""
    return {
        name: OpStats(rule, cache, miss, left, budget.slow_decisions(name))
        for name, rule, cache, miss, left in _core.counts()
    }


def stats_clear() -> None:
    """Sets all counts back to 0."""
    _core.clear_counts()
    budget.clear()


def cache_info() -> CacheInfo:
    """Returns the state of the cache of plans."""
    info = _core.cache_info()
    return CacheInfo(
        info.hits, info.misses, info.evictions, info.size, info.capacity, _core.known_specs()
    )


def cache_clear() -> None:
    """Forgets all plans and the counts of the cache, and what torch decided in this thread."""
    _compat.forget_decisions()
    _core.cache_clear()
    _core.clear_specs()
    inference.clear()


def set_cache_capacity(plans: int) -> None:
    """Bounds the cache; what no longer fits is evicted, least recently used first.

    Args:
        plans: at least 1; 16384 by default, of about 1 kB each.

    Raises:
        ValueError: it is less than 1.
    """
    if plans < 1:
        raise ValueError(f"set_cache_capacity: plans={plans} must be at least 1")
    _core.set_cache_capacity(plans)
