"""Functions of torch that are caught while a module's own code runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["Calls", "Operator", "Span"]

Operator: TypeAlias = Callable[..., Any]


@dataclass
class Calls:
    """The calls of one function in a module's own code.

    Attributes:
        function: of torch.
        instead: what is called, by the call's number; with None, in all others.
        count: of calls so far.
    """

    function: Operator
    instead: dict[int | None, Operator] = field(default_factory=dict)
    count: int = 0

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
        self._table = table
        self._modes: list[_Catching] = []

    def begin(self, *_: Any) -> None:
        """The module's code begins."""
        for calls in self._table.values():
            calls.count = 0
        self.enter()

    def enter(self, *_: Any) -> None:
        """It goes on: a child's is through."""
        mode: Any = _Catching(self._table)
        mode.__enter__()
        self._modes.append(mode)

    def leave(self, _: nn.Module, *__: Any) -> None:
        """A child's code begins, or the module's is through."""
        if self._modes:
            mode: Any = self._modes.pop()
            mode.__exit__(None, None, None)


class _Catching(TorchFunctionMode):
    """Calls others for some functions of torch."""

    def __init__(self, table: Mapping[Operator, Calls]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Operator, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))
