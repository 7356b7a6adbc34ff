"""Replaces the ``forward`` of a module, and restores it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["ReplacedForward", "forward_of"]


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the function that a module's ``forward`` is, which takes the module first.

    It is the same for all modules of a class, whose own ``forward`` it is, so that torch.compile
    compiles it once.
    """
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    if isinstance(own, MethodType) and own.__self__ is module:
        return own.__func__

    @functools.wraps(own)
    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return forward


class ReplacedForward(RemovableHandle):
    """A ``forward`` that replaces a module's own until it is removed.

    It is bound as a method, so that a copy of the module calls it with the copy.

    Args:
        module: whose ``forward`` is replaced.
        function: takes the module, and what its ``forward`` takes.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        # Weak references: this must not keep a model alive, of which the function may have modules.
        self._module, self._function = weakref.ref(module), weakref.ref(function)
        self._had_its_own, self._before = "forward" in vars(module), forward_of(module)
        module.forward = MethodType(function, module)

    def remove(self) -> None:
        """Restores the ``forward`` from before, unless others have replaced it since."""
        module = self._module()
        if module is None or forward_of(module) is not self._function():
            return
        del module.forward
        if self._had_its_own:
            module.forward = MethodType(self._before, module)
