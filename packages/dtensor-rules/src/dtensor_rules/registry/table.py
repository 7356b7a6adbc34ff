"""The table of rules, in the order in which they are asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from dtensor_rules import _core
from dtensor_rules.plan import Plan
from dtensor_rules.planning.operators import why_never_asked
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.pattern import kinds_of
from dtensor_rules.registry.rule import Rule
from dtensor_rules.registry.validation import check_plan


@dataclass(frozen=True)
class ListedRule:
    """A rule in the table.

    Attributes:
        rule: as it was registered.
        hits: how many calls ran a plan that it made.
    """

    rule: Rule
    hits: int


@dataclass(frozen=True)
class _Entry:
    rule: Rule
    counter: _core.RuleCounter


_table: list[_Entry] = []

# Called after each change; by patches.py, while the library is on.
listeners: list[Callable[[], None]] = []


def register_rule(rule: Rule, *, before: str | None = None, after: str | None = None) -> None:
    """Puts a rule into the table: at its end, or beside another.

    Args:
        rule: of a name that no other has.
        before: the name of the rule that it is asked before.
        after: the name of the rule that it is asked after.

    Warns:
        UserWarning: no call can come to it, by its operator or its kind.

    Raises:
        ValueError: its name is taken, ``before`` or ``after`` is nobody's name, or both are given.
    """
    if before is not None and after is not None:
        raise ValueError(f"register_rule: before={before!r} and after={after!r}: give one of them")
    if rule.name in names():
        raise ValueError(
            f"register_rule: a rule named {rule.name!r} is there already; remove_rule() it first, "
            f"or give this one another name"
        )
    at = len(_table)
    if before is not None:
        at = _index(before)
    elif after is not None:
        at = _index(after) + 1
    if (why := _why_never_asked(rule)) is not None:
        warnings.warn(f"Rule {rule.name!r} will not be asked about {rule.op}: {why}", stacklevel=2)
    _table.insert(at, _Entry(rule, _core.RuleCounter()))
    _changed()


def remove_rule(name: str) -> None:
    """Takes a rule out of the table, built-in ones included.

    Raises:
        ValueError: no rule has this name.
    """
    del _table[_index(name)]
    _changed()


def rules() -> tuple[ListedRule, ...]:
    """Returns the rules in their order, with the number of calls that used their plans."""
    return tuple(ListedRule(entry.rule, entry.counter.hits) for entry in _table)


def registered() -> list[Rule]:
    """Returns the rules in their order."""
    return [entry.rule for entry in _table]


def names() -> list[str]:
    """Returns the names of the rules, in their order."""
    return [entry.rule.name for entry in _table]


def name_of(plan: Plan) -> str | None:
    """Returns the name of the rule that made a plan; None for torch's propagation."""
    found = (entry.rule.name for entry in _table if entry.counter is plan.rule)
    return next(found, None)


def match(call: Call) -> Plan | None:
    """Returns the plan of the first rule that matches and has one, for calls on one mesh."""
    if any(spec.mesh != call.specs[0].mesh for spec in call.specs):
        return None
    for entry in list(_table):
        if (plan := _answer(entry.rule, call)) is not None:
            if not isinstance(plan, Plan):
                raise TypeError(
                    f"Rule {entry.rule.name!r}: its action returned {plan!r} for {call.op}; "
                    f"return a Plan, or None to leave the call to other rules"
                )
            check_plan(entry.rule.name, call, plan)
            return replace(plan, rule=entry.counter)
    return None


def _why_never_asked(rule: Rule) -> str | None:
    if rule.overload is None:  # it names a pattern
        return None
    if rule.kind != "*" and rule.kind not in (kinds := kinds_of(rule.overload)):
        return (
            f"the rule is for kind={rule.kind!r}, and the operator is {' and '.join(sorted(kinds))}"
        )
    return why_never_asked(rule.overload)


def _answer(rule: Rule, call: Call) -> Plan | None:
    try:
        return rule.action(call) if rule.matches(call) else None
    except Exception as error:
        error.add_note(f"raised by rule {rule.name!r} for {call.op}")
        raise


def _changed() -> None:
    for listener in listeners:
        listener()


def _index(name: str) -> int:
    try:
        return names().index(name)
    except ValueError:
        raise ValueError(f"no rule is named {name!r}; there are {', '.join(names())}") from None
