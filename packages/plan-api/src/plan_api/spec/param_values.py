"""Options of fully_shard of which parameters have different values: by pattern or function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from plan_api.spec.path import PathKind, TensorPath, parse_path
from plan_api.spec.policies import PolicyValue

__all__ = ["ParamValues", "ValueOption"]

# One value for all parameters; or values by patterns of names; or a function of a parameter.
ValueOption: TypeAlias = Any | Mapping[str, Any] | Callable[[nn.Parameter], Any]


@dataclass(frozen=True)
class ParamValues:
    """The values of ``granularity`` or ``quantize`` that an entry gives its parameters.

    Attributes:
        option: one of both.
        rows: patterns of full names of parameters, each with its value; others have none.
        function: returns the value of a parameter, or None; None where there are rows.
    """

    option: str
    rows: tuple[tuple[TensorPath, PolicyValue], ...] = ()
    function: Callable[[nn.Parameter], Any] | None = None

    @classmethod
    def of(cls, what: str, option: str, given: ValueOption) -> ParamValues | PolicyValue | None:
        """Returns what a user gave as values that plans can store.

        Args:
            what: begins messages.
            option: ``granularity`` or ``quantize``.
            given: see `ValueOption`; None: parameters have no value.

        Raises:
            ValueError: a value has none of the package's classes, or a pattern is none.
        """
        if given is None or isinstance(given, PolicyValue | cls):
            return given
        if isinstance(given, Mapping):
            paths = [_parameter_path(f"{what}: {option}", pattern) for pattern in given]
            values = [PolicyValue.of(what, option, value) for value in given.values()]
            return cls(option, tuple(zip(paths, values, strict=True)))
        if callable(given) and not isinstance(given, type):
            return cls(option, function=given)
        return PolicyValue.of(what, option, given)

    @classmethod
    def by_name(cls, option: str, values: Mapping[str, PolicyValue | None]) -> ParamValues | None:
        """Returns the values of parameters by their full names; None if none has one."""
        rows = [(parse_path(re.escape(name)), one) for name, one in values.items() if one]
        return cls(option, tuple(rows)) if rows else None

    def under(self, prefix: str) -> ParamValues:
        """Returns the values in a model that has this one as its submodule ``prefix``."""
        return replace(self, rows=tuple((path.under(prefix), value) for path, value in self.rows))

    def value_of(self, what: str, name: str, param: nn.Parameter) -> PolicyValue | None:
        """Returns the value of a parameter.

        Args:
            what: begins messages.
            name: of the parameter, from the root.
            param: as the model has it before it is placed.

        Raises:
            ValueError: two patterns match the name, or the function returned something else.
        """
        if self.function is not None:
            found = self.function(param)
            if found is None:
                return None
            return PolicyValue.of(f"{what}: {name}", self.option, found, by_function=True)
        matched = [(path.text, value) for path, value in self.rows if path.matches(name)]
        if len(matched) > 1:
            patterns = " and ".join(repr(text) for text, _ in matched)
            raise ValueError(
                f"{what}: {self.option}: expected one pattern that matches {name}, got {patterns}; "
                f"make one of them narrower"
            )
        return matched[0][1] if matched else None

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """Returns the patterns that match none of these names."""
        names = list(names)
        return [path.text for path, _ in self.rows if not any(map(path.matches, names))]

    def to_json(self) -> dict[str, Any]:
        """Returns the patterns with the values.

        Raises:
            ValueError: there is a function.
        """
        if self.function is not None:
            raise ValueError(
                f"to_json: expected {self.option} by value or by pattern, got {self!r}, which "
                f"JSON cannot have; write plan.resolved(model).to_json(), with its values for the "
                f"parameters of a model"
            )
        return {path.pattern: value.to_json() for path, value in self.rows}

    @classmethod
    def from_json(cls, what: str, option: str, value: Any) -> ParamValues | PolicyValue:
        """Reads what this class's `to_json`, or that of `PolicyValue`, returned.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(value, Mapping) or "policy" in value:
            return PolicyValue.from_json(what, option, value)
        paths = [_parameter_path(f"{what}: {option}", pattern) for pattern in value]
        values = [PolicyValue.from_json(what, option, one) for one in value.values()]
        return cls(option, tuple(zip(paths, values, strict=True)))

    def __repr__(self) -> str:
        if self.function is not None:
            return f"by {getattr(self.function, '__qualname__', type(self.function).__name__)}"
        return "{" + ", ".join(f"{path.text!r}: {value}" for path, value in self.rows) + "}"


def _parameter_path(what: str, pattern: str) -> TensorPath:
    path = parse_path(pattern)
    if path.kind is not PathKind.STATE:
        raise ValueError(
            f"{what}: expected a pattern of names of parameters, such as "
            f"{re.escape('layers.0.weight')!r}, got {pattern!r}"
        )
    return path
