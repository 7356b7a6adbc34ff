"""A rule: which calls it is for, and what it makes of them.

Note: a *rule* has four fields that say which calls it is for, `<op, kind, placements, meta>`, and
an *action* that makes their plan without the whole of torch's propagation. Rules are ordered; the
first that matches and answers wins, and its answer is cached like any other plan (veScale,
section 6.1).
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dtensor_rules.registry.call import Call
from dtensor_rules.registry.pattern import KINDS, fit_on_an_axis, is_word, kinds_of

if TYPE_CHECKING:
    from dtensor_rules.plan import Plan


@dataclass(frozen=True)
class Rule:
    """One entry of the table of rules.

    Attributes:
        op: the operator's name, as ``aten.add.Tensor``; ``*`` and ``?`` match as in file names.
        action: makes the plan, or returns None to leave the call to the rules behind. Every rank
            must decide alike, so it reads what is the same on all: specs, not local tensors.
        kind: ``functional``, ``in-place``, ``out-given`` (which an in-place operator is too),
            ``view``, or ``*``.
        placements: ``*``, or a word per DTensor among the positional arguments: ``replicate``,
            ``shard``, ``shard(0)``, ``partial``, ``partial(sum)``, the name of another class of
            placements, or ``*``. They describe one mesh axis: the rule matches where some axis
            has them, and what the other axes may be is the action's to say.
        meta: ``*``, or a predicate on the call, asked after the other fields.
        numbers: whether action or predicate read scalars that torch's strategies do not, such as
            `alpha` or a learning rate. Calls that differ in one then get plans of their own; a rule
            for many operators that reads placements only should say False.
        name: what the rule is listed and addressed by; by default that of the action.

    Raises:
        ValueError: an operator that torch does not have, an unknown kind, a bad word.
        TypeError: an action, or a predicate, that cannot be called with one argument.
    """

    op: str
    action: Callable[[Call], Plan | None]
    kind: str = "*"
    placements: tuple[str, ...] | str = "*"
    meta: Callable[[Call], bool] | str = "*"
    numbers: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.action, "__name__", repr(self.action)))
        where = f"Rule {self.name!r}"
        _check_op(where, self.op)
        if self.kind not in KINDS:
            raise ValueError(f"{where}: kind={self.kind!r} is none of {', '.join(KINDS)}")
        _check_placements(where, self.placements)
        _check_callable(where, "action", self.action)
        if self.meta != "*":
            _check_callable(where, "meta", self.meta)

    @property
    def overload(self) -> torch._ops.OpOverload | None:
        """The operator that it names; None where it names a pattern."""
        if _is_pattern(self.op):
            return None
        namespace, name, overload = self.op.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        assert isinstance(found, torch._ops.OpOverload)
        return found

    def is_for(self, op: torch._ops.OpOverload) -> bool:
        """Whether the first field fits an operator."""
        return fnmatch.fnmatchcase(str(op), self.op)

    def matches(self, call: Call) -> bool:
        """Whether all four fields fit a call."""
        return (
            self.is_for(call.op)
            and (self.kind == "*" or self.kind in kinds_of(call.op))
            and (isinstance(self.placements, str) or fit_on_an_axis(self.placements, call.specs))
            and (isinstance(self.meta, str) or self.meta(call))
        )


def _is_pattern(op: str) -> bool:
    return any(character in op for character in "*?[")


def _check_op(where: str, op: str) -> None:
    """Checks that a name without wildcards is an operator's."""
    if _is_pattern(op):
        return
    namespace, _, rest = op.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if name else None
    if packet is None or overload not in packet.overloads():
        known = f"; {namespace}.{name} has {', '.join(packet.overloads())}" if packet else ""
        if "::" in op:
            known = f"; write {op.replace('::', '.')}.default, or the name of another overload"
        raise ValueError(f"{where}: op={op!r} is no operator such as 'aten.add.Tensor'{known}")


def _check_placements(where: str, placements: Any) -> None:
    if placements == "*":
        return
    if isinstance(placements, str) or not placements:
        raise ValueError(
            f"{where}: placements={placements!r} must be '*' or a tuple with a word per DTensor"
        )
    for word in placements:
        if not isinstance(word, str) or not is_word(word):
            raise ValueError(
                f"{where}: placements={placements!r}: {word!r} is none of '*', 'replicate', "
                f"'shard', 'shard(0)', 'partial', 'partial(sum)' or the name of a class"
            )


def _check_callable(where: str, field: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{where}: {field}={value!r} must be a function of one Call")
    try:
        signature = inspect.signature(value)
    except ValueError:
        return  # compiled, and says nothing of its arguments
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(
            f"{where}: {field}={value!r} must be callable with one Call: {error}"
        ) from None
