"""`OpDispatcher.wrap` while the library is on: for the results of the calls that are torch's.

torch's C++ looks the function up once, at the first DTensor operator, and holds it from then on. So
the function stays the object that it is, and while the library is on its code calls C++.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch.distributed.tensor import DTensor

from dtensor_rules import _core

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Has `wrap` ask C++ (wrap_result.h); not where this torch has another kind of function."""
    wrap: Any = DTensor._op_dispatcher.wrap
    if not _is_known(wrap):
        return
    native = wrap.__code__
    _core.set_native_wrap(FunctionType(native, wrap.__globals__, wrap.__name__))
    wrap.__code__ = _calling_cpp()
    _undo.append(lambda: setattr(wrap, "__code__", native))


def remove() -> None:
    """Gives torch's function its own code back."""
    while _undo:
        _undo.pop()()


def _is_known(wrap: object) -> bool:
    """Whether it is a function of Python's, without a closure, of a result and its spec."""
    if not isinstance(wrap, FunctionType) or wrap.__code__.co_freevars:
        return False
    return wrap.__code__.co_varnames[: wrap.__code__.co_argcount] == ("res", "spec")


def _calling_cpp() -> CodeType:
    """Returns code with the C function as a constant, so that torch's globals do not change."""

    def wrap(res: object, spec: object) -> object:
        fast: Any = "C++"
        return fast(res, spec)

    code = wrap.__code__
    constants = tuple(
        _core.wrap_result if co_const == "C++" else co_const for co_const in code.co_consts
    )
    return code.replace(co_consts=constants)
