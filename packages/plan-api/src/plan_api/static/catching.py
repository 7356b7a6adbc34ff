"""Functions of torch that are caught while a module's own code runs.

A mode sees every call of torch's functions, however the code has come by them, and makes each of
them cost several microseconds more. Where code finds a function in torch's modules whenever it
calls it (`F.dropout`), it is enough to put another one there for the time; that costs nothing.
Which it is a span finds out in its first run. Methods of tensors always need the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Calls", "Operator", "Span"]

Operator: TypeAlias = Callable[..., Any]


@dataclass
class Calls:
    """The calls of one function in a module's own code.

    Attributes:
        function: of torch.
        name: it goes by there.
        instead: what is called, by the call's number; with None, in all others.
        count: of calls so far.
        by_name: of these, how many have found the function in one of torch's modules.
    """

    function: Operator
    name: str
    instead: dict[int | None, Operator] = field(default_factory=dict)
    count: int = 0
    by_name: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what is to be called instead."""
        number, self.count = self.count, self.count + 1
        function = self.instead.get(number) or self.instead.get(None, self.function)
        return function(*args, **kwargs)


class Span:
    """While a module's own code runs: begun by it, left for children.

    Args:
        table: what is caught.
    """

    def __init__(self, table: Mapping[Operator, Calls]) -> None:
        self._calls = list({id(calls): calls for calls in table.values()}.values())
        # A type like Tensor is no place to put anything for a moment.
        self._names = [
            _Name(place, calls, self._found(calls))
            for calls in self._calls
            for place in (F, torch)
            if getattr(place, calls.name, None) is calls.function
        ]
        # Python's functions find themselves there as well, and tell it modes.
        self._table = {**table, **{name.instead: name.calls for name in self._names}}
        have_names = {id(name.calls) for name in self._names} == {id(one) for one in self._calls}
        # Whether they are all found there, by whether the module trains.
        self._by_name: dict[bool, bool] = {} if have_names else {True: False, False: False}
        self._known: bool | None = None
        self._thread = 0
        self._open = False
        self._before: list[Operator] = []
        self._modes: list[_Catching] = []

    def begin(self, module: nn.Module, _: Any) -> None:
        """The module's code begins."""
        for calls in self._calls:
            calls.count = calls.by_name = 0
        self._known, self._thread = self._by_name.get(module.training), get_ident()
        self.enter()

    def enter(self, *_: Any) -> None:
        """It goes on: a child's is through."""
        self._open = True
        if self._known is not False:
            # Not the functions themselves where a span around this one has put others.
            self._before = [getattr(name.place, name.calls.name) for name in self._names]
            for name in self._names:
                setattr(name.place, name.calls.name, name.instead)
        if not self._known:
            mode: Any = _Catching(self._table)
            mode.__enter__()
            self._modes.append(mode)

    def leave(self, *_: Any) -> None:
        """A child's code begins."""
        if not self._open:
            return
        self._open = False
        if self._known is not False:
            for name, before in zip(self._names, self._before, strict=True):
                setattr(name.place, name.calls.name, before)
        if self._modes:
            mode: Any = self._modes.pop()
            mode.__exit__(None, None, None)

    def end(self, module: nn.Module, *_: Any) -> None:
        """The module's code is through."""
        self.leave()
        if self._known is None:
            by_name = all(calls.count == calls.by_name for calls in self._calls)
            self._by_name[module.training] = by_name

    def _found(self, calls: Calls) -> Operator:
        def found(*args: Any, **kwargs: Any) -> Any:
            # Not where another thread has put this back after it was through.
            if self._known and self._open and get_ident() == self._thread:
                return calls(*args, **kwargs)
            calls.by_name += 1
            return calls.function(*args, **kwargs)  # which the mode sees, if there is one

        return found


@dataclass(frozen=True)
class _Name:
    """Where code finds a function, and what it finds there while it is caught."""

    place: ModuleType
    calls: Calls
    instead: Operator


class _Catching(TorchFunctionMode):
    """Calls others for some functions of torch."""

    def __init__(self, table: Mapping[Operator, Calls]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))
