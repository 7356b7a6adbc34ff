"""The ways to write one call of a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """One way to write a call.

    Attributes:
        name: ``"defaults"``, ``"position"`` or ``"keyword"``.
        args: arguments by position.
        kwargs: arguments by keyword.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, function: Callable[..., Any]) -> Any:
        """Calls a function in this form."""
        return function(*self.args, **self.kwargs)


def call_forms(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[CallForm]:
    """Writes a call in every way that a function's signature allows.

    For tests that a replacement takes the calls of the original: make the forms of the original,
    and call both in each of them. The signature of the replacement says little, as wrappers copy
    it from the original.

    Args:
        function: the original, which has a signature.
        *args: arguments of the call.
        **kwargs: arguments of the call.

    Returns:
        ``"defaults"``, the arguments that were given alone; ``"position"``, all arguments, those of
        defaults too, by position where that is possible; ``"keyword"``, all of them by keyword
        where that is possible.

    Raises:
        TypeError: the function does not take these arguments.
        ValueError: the function has no signature.
    """
    signature = inspect.signature(function)
    bound = signature.bind(*args, **kwargs)
    forms = [CallForm("defaults", bound.args, bound.kwargs)]
    bound.apply_defaults()
    forms.append(CallForm("position", bound.args, bound.kwargs))
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            positional += value
        elif kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(value)
        else:
            named[name] = value
    return [*forms, CallForm("keyword", tuple(positional), named)]
