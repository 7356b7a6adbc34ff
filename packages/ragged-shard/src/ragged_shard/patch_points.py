"""Replaces functions of torch with those of this package for every caller, and restores them.

torch imports its private functions by name into several modules, as users do with public ones, so
rebinding a module's attribute reaches only some callers. So the code of the function object is
replaced: the object remains, with its name and signature, and runs this package's code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_MARK = "__ragged_shard_patch__"


@dataclass(frozen=True)
class _Patch:
    name: str
    in_effect: Callable[[], bool]
    undo: Callable[[], None]


class Patches:
    """Replacements in torch that are undone together, in reverse order."""

    def __init__(self) -> None:
        self._applied: list[_Patch] = []

    def function(self, function: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        """Makes a function run ``replacement(native, *args, **kwargs)`` for all of its callers.

        Args:
            function: of torch, a plain Python function without free variables.
            replacement: gets the original as its first argument.

        Raises:
            TypeError: it is not such a function, as in an unsupported version of torch, or is
                replaced already.
        """
        if not isinstance(function, FunctionType) or function.__code__.co_freevars:
            raise TypeError(
                f"ragged_shard: expected a plain Python function, got {function!r}; use a "
                f"supported version of torch"
            )
        if hasattr(function, _MARK):
            raise TypeError(
                f"ragged_shard: expected a function of torch's, got a patch: {function!r}"
            )
        native = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        native.__kwdefaults__ = function.__kwdefaults__
        name = f"__ragged_shard_{function.__name__}__"
        code = _calling(name, function.__name__)
        attributes = dict(function.__dict__)
        signature = inspect.signature(function)

        def call(*args: object, **kwargs: object) -> object:
            return replacement(native, *args, **kwargs)

        def undo() -> None:
            function.__code__ = native.__code__
            function.__defaults__ = native.__defaults__
            function.__kwdefaults__ = native.__kwdefaults__
            function.__dict__.clear()
            function.__dict__.update(attributes)
            del function.__globals__[name]

        function.__globals__[name] = call
        function.__code__ = code
        function.__defaults__ = function.__kwdefaults__ = None
        function.__signature__ = signature  # type: ignore[attr-defined]
        setattr(function, _MARK, True)
        described = f"{function.__module__}.{function.__qualname__}"
        self._applied.append(_Patch(described, lambda: function.__code__ is code, undo))

    def method(self, owner: type, name: str, replacement: Callable[..., Any]) -> None:
        """Makes a class's method run ``replacement(native, self, *args, **kwargs)``.

        Args:
            owner: the class that has it.
            name: of a method or a static method; of a static method the replacement gets no self.
            replacement: gets the original as its first argument.
        """
        found = inspect.getattr_static(owner, name)
        static = isinstance(found, staticmethod)
        native = found.__func__ if static else found

        def call(*args: object, **kwargs: object) -> object:
            return replacement(native, *args, **kwargs)

        call.__name__, call.__doc__ = native.__name__, native.__doc__
        call.__signature__ = inspect.signature(native)  # type: ignore[attr-defined]
        setattr(call, _MARK, True)
        self.attribute(owner, name, staticmethod(call) if static else call)

    def attribute(self, owner: Any, name: str, value: object) -> None:
        """Sets an attribute of a class or an object."""
        inherited = name not in vars(owner)
        before = inspect.getattr_static(owner, name)

        def undo() -> None:
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        setattr(owner, name, value)
        described = f"{getattr(owner, '__qualname__', type(owner).__qualname__)}.{name}"
        self._applied.append(_Patch(described, lambda: vars(owner).get(name) is value, undo))

    def item(self, table: MutableMapping[Any, Any], key: object, value: object) -> None:
        """Replaces an entry that a table already has."""
        before = table[key]
        table[key] = value
        self._applied.append(
            _Patch(
                f"the entry of {key}",
                lambda: table.get(key) is value,
                lambda: table.__setitem__(key, before),
            )
        )

    def undo_with(self, name: str, undo: Callable[[], None]) -> None:
        """Registers the function that undoes a change made by the caller."""
        self._applied.append(_Patch(name, lambda: True, undo))

    def restore(self) -> None:
        """Undoes every replacement.

        Raises:
            RuntimeError: other code has replaced something since; nothing is undone.
        """
        for patch in self._applied:
            if not patch.in_effect():
                raise RuntimeError(
                    f"ragged_shard.uninstall: expected {patch.name} as set by "
                    f"ragged_shard.install(), got another patch; undo that first"
                )
        while self._applied:
            self._applied.pop().undo()


#: What `ragged_shard.install` has replaced; None where it is not in effect.
installed: Patches | None = None
#: `ragged_shard.install`, which ``ragged_shard/__init__.py`` registers: it imports the placements,
#: whose constructors call it.
installer: Callable[[], object] | None = None


def ensure_installed() -> None:
    """Calls `ragged_shard.install` if it is not in effect; placements call it when constructed."""
    if installed is None:
        assert installer is not None, "ragged_shard/__init__.py registers it"
        installer()


def _calling(name: str, co_name: str) -> Any:
    """Returns the code of a function that calls a global of this name with its arguments."""

    def run(*args: object, **kwargs: object) -> object:
        return __ragged_shard_call__(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821

    names = (name if n == "__ragged_shard_call__" else n for n in run.__code__.co_names)
    return run.__code__.replace(co_names=tuple(names), co_name=co_name)
