"""Forms of one call of a function: by position, by keyword, with defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """One form of a call.

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
    """Returns the forms of a call that a function's signature allows.

    Use it to test that a replacement accepts the calls of the original: make the forms of the
    original, and call both with each of them. The signature of a replacement does not prove it, as
    wrappers copy it from the original.

    Args:
        function: the original, which has a signature.
        *args: arguments of the call.
        **kwargs: arguments of the call.

    Returns:
        ``"defaults"`` with the passed arguments only, ``"position"`` with all arguments, defaults
        included, by position where possible, and ``"keyword"`` with all of them by keyword where
        possible.

    Raises:
        TypeError: the function does not accept these arguments.
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
