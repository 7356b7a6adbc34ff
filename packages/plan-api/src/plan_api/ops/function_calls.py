"""Intercepts functions of torch: while a module's own code runs, or those that take DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
)

__all__ = [
    "FunctionInterception", "InterceptedCalls", "TorchFunction", "replace_for_dtensors",
    "with_wrapped",
]  # fmt: skip

TorchFunction: TypeAlias = Callable[..., Any]


def replace_for_dtensors(name: str, local: TorchFunction) -> Callable[[], None]:
    """Replaces a function of `torch.nn.functional` where its first argument is a DTensor.

    Modes of functions see one call, of the replacement with all arguments: some of torch's
    functions pass on a part only, as `l1_loss` does.

    Args:
        name: of the function.
        local: is called instead, with the function and its arguments; returns NotImplemented where
            the function itself is right.

    Returns:
        the inverse, which leaves a function that others have put there since.
    """
    native: TorchFunction = getattr(nn.functional, name)

    @functools.wraps(native)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.get("input")
        if has_torch_function_unary(first):
            return handle_torch_function(replacement, (first,), *args, **kwargs)
        if isinstance(first, DTensor):
            result = local(native, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return native(*args, **kwargs)

    setattr(nn.functional, name, replacement)

    def restore() -> None:
        if getattr(nn.functional, name) is replacement:
            setattr(nn.functional, name, native)

    return restore


def with_wrapped(function: TorchFunction) -> Iterator[TorchFunction]:
    """Returns a function, and those that it wraps: this package and dist-rng replace some."""
    inner: TorchFunction | None = function
    while inner is not None:
        yield inner
        inner = getattr(inner, "__wrapped__", None)


@dataclass
class InterceptedCalls:
    """The intercepted calls of one function in a module's own code.

    Attributes:
        function: of torch.
        replacements: what is called instead, by the number of the call; with None, for all others.
        count: the number of calls so far.
    """

    function: TorchFunction
    replacements: dict[int | None, TorchFunction] = field(default_factory=dict)
    count: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the replacement, or the function itself."""
        number, self.count = self.count, self.count + 1
        function = self.replacements.get(number) or self.replacements.get(None, self.function)
        return function(*args, **kwargs)


class FunctionInterception:
    """Intercepts functions while a module's own code runs, and not while its children run.

    Args:
        table: the intercepted calls, by function.
    """

    def __init__(self, table: Mapping[TorchFunction, InterceptedCalls]) -> None:
        self._table = table
        self._modes: list[_InterceptionMode] = []

    def begin(self, *_: Any) -> None:
        """Starts when the module's forward begins."""
        for calls in self._table.values():
            calls.count = 0
        self.enter()

    def enter(self, *_: Any) -> None:
        """Resumes when a child has run."""
        mode: Any = _InterceptionMode(self._table)
        mode.__enter__()
        self._modes.append(mode)

    def leave(self, _: nn.Module, *__: Any) -> None:
        """Stops when a child begins, or the module has run."""
        if self._modes:
            mode: Any = self._modes.pop()
            mode.__exit__(None, None, None)


class _InterceptionMode(TorchFunctionMode):
    """Calls replacements for some functions of torch."""

    def __init__(self, table: Mapping[TorchFunction, InterceptedCalls]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))
