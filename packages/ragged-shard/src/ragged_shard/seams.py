"""Putting our own functions in place of torch's, for every caller, also those that came before.

torch imports its private functions by name into several modules, and users do so with the public
ones, so rebinding a module's attribute reaches some callers only. A function is therefore replaced
inside: the object stays, with its name and signature, and runs our code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_MARK = "__ragged_shard_seam__"


def replace_function(function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Makes a function run ``replacement(stock, *args, **kwargs)``, whoever holds it.

    Args:
        function: of torch's, a plain Python function without free variables.
        replacement: gets the original as its first argument.

    Raises:
        TypeError: what torch holds there is no such function (a version that is not supported).
    """
    if getattr(function, _MARK, False):
        return
    if not isinstance(function, FunctionType) or function.__code__.co_freevars:
        raise TypeError(
            f"ragged_shard: {function!r} is no plain function; is this torch supported?"
        )
    signature = inspect.signature(function)
    stock = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    stock.__kwdefaults__ = function.__kwdefaults__

    def run(*args: object, **kwargs: object) -> object:
        return __ragged_shard_call__(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    name = f"__ragged_shard_{function.__name__}__"
    code = run.__code__.replace(
        co_names=tuple(name if n == "__ragged_shard_call__" else n for n in run.__code__.co_names),
        co_name=function.__name__,
    )

    def call(*args: object, **kwargs: object) -> object:
        return replacement(stock, *args, **kwargs)

    function.__globals__[name] = call
    function.__code__ = code
    function.__defaults__ = function.__kwdefaults__ = None
    function.__signature__ = signature  # type: ignore[attr-defined]
    setattr(function, _MARK, True)


def replace_method(owner: type, name: str, replacement: Callable[..., Any]) -> None:
    """Makes a class's method run ``replacement(stock, self, *args, **kwargs)``.

    Args:
        owner: the class that defines it.
        name: of a method or a static method; of a static method the replacement gets no self.
        replacement: gets the original as its first argument.
    """
    found = inspect.getattr_static(owner, name)
    static = isinstance(found, staticmethod)
    stock = found.__func__ if static else found
    if getattr(stock, _MARK, False):
        return

    def call(*args: object, **kwargs: object) -> object:
        return replacement(stock, *args, **kwargs)

    call.__name__, call.__doc__ = stock.__name__, stock.__doc__
    setattr(call, _MARK, True)
    setattr(owner, name, staticmethod(call) if static else call)
