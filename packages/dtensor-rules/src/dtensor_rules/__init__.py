"""DTensor dispatch in C++: rules, a cache of sharding decisions, and their execution."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dtensor_rules.registry.headers import get_include

__version__ = "0.1.0"

# Loaded at first use: importing the package needs neither torch nor the extension module.
_MODULES = {
    "CacheInfo": "inspect.counts",
    "Call": "registry.call",
    "ListedRule": "registry.table",
    "Move": "plan",
    "OpStats": "inspect.counts",
    "Plan": "plan",
    "Rule": "registry.rule",
    "cache_clear": "inspect.counts",
    "cache_info": "inspect.counts",
    "disable": "switch",
    "enable": "switch",
    "enabled": "switch",
    "is_enabled": "switch",
    "register_rule": "registry.table",
    "remove_rule": "registry.table",
    "rules": "registry.table",
    "set_cache_capacity": "inspect.counts",
    "set_planning_budget": "planning.budget",
    "stats": "inspect.counts",
    "stats_clear": "inspect.counts",
}
__all__ = [
    "CacheInfo",
    "Call",
    "ListedRule",
    "Move",
    "OpStats",
    "Plan",
    "Rule",
    "cache_clear",
    "cache_info",
    "disable",
    "enable",
    "enabled",
    "get_include",
    "is_enabled",
    "register_rule",
    "remove_rule",
    "rules",
    "set_cache_capacity",
    "set_planning_budget",
    "stats",
    "stats_clear",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'dtensor_rules' has no attribute {name!r}")
    # First, and with torch: it says what is wrong where the extension module is another torch's.
    importlib.import_module("dtensor_rules._compat")
    for public, module in _MODULES.items():
        globals()[public] = getattr(importlib.import_module(f"dtensor_rules.{module}"), public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from dtensor_rules.inspect.counts import (
        CacheInfo,
        OpStats,
        cache_clear,
        cache_info,
        set_cache_capacity,
        stats,
        stats_clear,
    )
    from dtensor_rules.plan import Move, Plan
    from dtensor_rules.planning.budget import set_planning_budget
    from dtensor_rules.registry.call import Call
    from dtensor_rules.registry.rule import Rule
    from dtensor_rules.registry.table import ListedRule, register_rule, remove_rule, rules
    from dtensor_rules.switch import disable, enable, enabled, is_enabled
