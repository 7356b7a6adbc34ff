"""Intercepts functions of torch: while a module's own code runs, or those that take DTensors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import (
    TorchFunctionMode,
    handle_torch_function,
    has_torch_function_unary,
)

__all__ = [
    "FunctionInterception", "InterceptedCalls", "TorchFunction", "intercepted_calls",
    "remove_redirects", "replace_for_dtensors", "with_wrapped",
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


class _Running(threading.local):
    """What this thread runs.

    Attributes:
        table: the intercepted calls of the module that runs, by function.
    """

    table: Mapping[TorchFunction, InterceptedCalls] = MappingProxyType({})


_running = _Running()


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
        """Calls the replacement, or the function itself; what these call is not intercepted."""
        number, self.count = self.count, self.count + 1
        function = self.replacements.get(number) or self.replacements.get(None, self.function)
        if torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        table, _running.table = _running.table, _Running.table
        try:
            return function(*args, **kwargs)
        finally:
            _running.table = table


def intercepted_calls(function: TorchFunction) -> InterceptedCalls | None:
    """Returns what the running module calls instead of a function; None: the function itself."""
    table = _running.table
    return next((table[inner] for inner in with_wrapped(function) if inner in table), None)


class FunctionInterception:
    """Intercepts functions while a module's own code runs, and not while its children run.

    Functions of `torch.nn.functional` are redirected: their names there look for what the running
    module has instead. A mode of functions, which costs each call of torch something, is used too
    where redirects could miss calls: of tensors' methods; in compiled code; where others have
    replaced a redirect; and in the first call in training, which finds out whether the module
    knows such a function by another name.

    Args:
        table: the intercepted calls, by function.
    """

    def __init__(self, table: Mapping[TorchFunction, InterceptedCalls]) -> None:
        names = {one.__name__ for one in table}
        self._redirects = [_redirect(name) for name in names if hasattr(nn.functional, name)]
        self._table = {**table}
        self._calls = list({id(calls): calls for calls in table.values()}.values())
        for one in self._redirects:
            inner = next(inner for inner in with_wrapped(one.function) if inner in table)
            self._table[one.function] = table[inner]
        self._needs_mode = any(
            not hasattr(nn.functional, name) or hasattr(torch.Tensor, name) for name in names
        )
        self._training_calls = 0
        # What `leave` ends and restores: the mode, and the table of the module outside.
        self._entered: list[tuple[Any, Mapping[TorchFunction, InterceptedCalls] | None]] = []

    def begin(self, module: nn.Module, *_: Any) -> None:
        """Starts when the module's forward begins."""
        for calls in self._calls:
            calls.count = 0
        if not torch.compiler.is_dynamo_compiling() and self._training_calls < 2:
            self._training_calls += module.training
        self.enter()

    def enter(self, *_: Any) -> None:
        """Resumes when a child has run."""
        mode: Any = None
        outer = None
        is_compiling = torch.compiler.is_dynamo_compiling()
        if is_compiling or self._uses_mode():
            mode = _InterceptionMode(self._table, self._on_other_name)
            mode.__enter__()
        if not is_compiling:
            outer, _running.table = _running.table, self._table
        self._entered.append((mode, outer))

    def leave(self, _: nn.Module, *__: Any) -> None:
        """Stops when a child begins, or the module has run."""
        if not self._entered:
            return
        mode, outer = self._entered.pop()
        if mode is not None:
            mode.__exit__(None, None, None)
        if outer is not None:
            _running.table = outer

    def _uses_mode(self) -> bool:
        if self._needs_mode or self._training_calls < 2:
            return True
        for one in self._redirects:  # noqa: SIM110  # all() makes a generator in each call
            if not one.is_in_place:
                return True
        return False

    def _on_other_name(self) -> None:
        self._needs_mode = True


class _InterceptionMode(TorchFunctionMode):
    """Calls replacements for some functions of torch, and tells that it was asked.

    Args:
        table: the intercepted calls, by function.
        on_call: is called with each of these functions.
    """

    def __init__(
        self,
        table: Mapping[TorchFunction, InterceptedCalls],
        on_call: Callable[[], None],
    ) -> None:
        super().__init__()
        self._table, self._on_call = table, on_call

    def __torch_function__(
        self, func: TorchFunction, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        calls = self._table.get(func, func)
        if calls is not func and not torch.compiler.is_dynamo_compiling():
            if _running.table is self._table:
                self._on_call()
            else:  # called by a replacement, or by a child
                calls = func
        return calls(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Redirect:
    """A function of `torch.nn.functional` that calls what the running module has for it.

    Attributes:
        name: of the function.
        native: what its name was before.
        function: what its name is now.
    """

    name: str
    native: TorchFunction
    function: TorchFunction

    @property
    def is_in_place(self) -> bool:
        """Whether callers find it by the name."""
        return getattr(nn.functional, self.name) is self.function


_redirects: dict[str, _Redirect] = {}


def _redirect(name: str) -> _Redirect:
    """Redirects a function of `torch.nn.functional`, once."""
    native: TorchFunction = getattr(nn.functional, name)
    known = _redirects.get(name)
    if known is not None and known.function in with_wrapped(native):
        return known  # in place, or what others have put there calls it

    @functools.wraps(native)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return native(*args, **kwargs)
        calls = _running.table.get(redirected)
        if calls is not None:
            return calls(*args, **kwargs)
        first = args[0] if args else next(iter(kwargs.values()), None)
        if has_torch_function_unary(first):
            # Here, as the native function would give modes its name's function, which is this one.
            return handle_torch_function(native, (first,), *args, **kwargs)
        return native(*args, **kwargs)

    setattr(nn.functional, name, redirected)
    _redirects[name] = _Redirect(name, native, redirected)
    return _redirects[name]


def remove_redirects() -> None:
    """Restores `torch.nn.functional`, but for functions that others have put there since."""
    for one in _redirects.values():
        if one.is_in_place:
            setattr(nn.functional, one.name, one.native)
    _redirects.clear()
