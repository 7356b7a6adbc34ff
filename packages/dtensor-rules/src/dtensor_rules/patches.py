"""Where torch's own state changes under the cache: what is listened to while the library is on.

Note: meshes that are equal but not the same object share their plans, here as in torch's own caches
of decisions, and results get the mesh that was met first. torch.compile knows meshes by identity,
so it has to meet one and the same in what the library made before it and in what torch makes while
it traces. Hence both caches are cleared together: when the library goes on or off, when either is
cleared, and when a process group is destroyed. Cached plans refer to meshes, and a mesh to its
groups: each would keep its threads and sockets, and the next world would get meshes of the last.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _op_schema, _redistribute, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dtensor_rules import _compat, _core, gathers, methods
from dtensor_rules.planning import expansion, inference, operators
from dtensor_rules.registry import table

_REGISTRATIONS = (
    "register_op_strategy",
    "register_single_dim_op_strategy",
    "register_sharding_prop_rule",
)

_undo: list[Callable[[], None]] = []


def install() -> None:
    """Listens to what changes decisions and plans, and replaces what torch makes them by."""
    _compat.forget_decisions()
    _undo.append(_compat.forget_decisions)
    propagator = DTensor._op_dispatcher.sharding_propagator
    watched = [*_compat.strategy_tables(), DTensor._op_dispatcher._custom_op_handlers]
    _core.watch(watched, _tables_changed)
    _undo.append(lambda: _core.watch([], None))
    table.listeners.append(_tables_changed)
    _undo.append(lambda: table.listeners.remove(_tables_changed))
    for name in _REGISTRATIONS:
        _after(propagator, name, _tables_changed)
    _after(torch._C, _compat.CLEAR, _forget_all)
    for name in _compat.UNREGISTER:
        _after(distributed_c10d, name, _compat.forget_decisions)
    _watch_specs()
    _watch_flattening()
    _wrap(_redistribute, _compat.TRANSFORMS, gathers.transforms_with_shape)
    _replace(_redistribute, _compat.MERGE, gathers.merge_transforms)
    _replace_everywhere(_compat.expand_to_full_mesh, expansion.expand)
    _undo.append(inference.clear)
    _wrap(propagator, "_propagate_tensor_meta_non_cached", inference.infer_with)
    _wrap(_op_schema, "_rebuild_tensor_from_dtensor_meta", inference.rebuild_with)
    _replace(_sharding_prop, "FakeTensorMode", inference.mode)
    _core.set_explicit_only(_compat.explicit_redistribution_only())
    _undo.append(lambda: _core.set_explicit_only(None))
    methods.install()
    _undo.append(methods.remove)


def remove() -> None:
    """Puts everything back that `install` has replaced."""
    while _undo:
        _undo.pop()()


def _tables_changed() -> None:
    _core.cache_clear()
    operators.install_kernels(table.registered())


def _forget_all() -> None:
    _core.cache_clear()
    _core.clear_specs()


def _after(owner: Any, name: str, then: Callable[[], object]) -> None:
    """Makes an attribute of an object or module call ``then`` when it has done its own work."""
    native = getattr(owner, name)

    @functools.wraps(native)
    def both(*args: object, **kwargs: object) -> object:
        result = native(*args, **kwargs)
        then()
        return result

    _replace(owner, name, both)


def _replace(owner: Any, name: str, replacement: Any) -> None:
    """Puts a function in the place of an attribute of a module or object."""
    own, native = name in vars(owner), getattr(owner, name)
    setattr(owner, name, replacement)
    _undo.append(lambda: setattr(owner, name, native) if own else delattr(owner, name))


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replaces a function by what a wrapper makes of it."""
    _replace(owner, name, wrapper(getattr(owner, name)))


def _replace_everywhere(native: Any, replacement: Any) -> None:
    """Puts a function in the place of torch's in every module that has it by that name."""
    name = native.__name__

    def replace(old: Any, new: Any) -> None:
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)

    replace(native, replacement)
    _undo.append(lambda: replace(replacement, native))


def _watch_specs() -> None:
    """Wraps `DTensorSpec.__setattr__`, as a changed spec is no longer the interned one."""
    native = DTensorSpec.__setattr__
    forget, clear = _core.forget_spec, _core.cache_clear

    @functools.wraps(native)
    def __setattr__(self: DTensorSpec, attr: str, value: Any) -> None:  # noqa: N807
        if attr != "_hash" and forget(self):
            clear()  # plans may hand this very object out
        native(self, attr, value)

    DTensorSpec.__setattr__ = __setattr__  # type: ignore[method-assign]
    _undo.append(lambda: setattr(DTensorSpec, "__setattr__", native))


def _watch_flattening() -> None:
    """Clears plans when a mesh is flattened, as more collectives can be merged then."""
    native = DeviceMesh._flatten

    @functools.wraps(native)
    def _flatten(self: DeviceMesh, *args: Any, **kwargs: Any) -> DeviceMesh:
        before = _compat.flattenings(self)
        flattened = native(self, *args, **kwargs)
        if _compat.flattenings(self) != before:
            _core.cache_clear()
        return flattened

    _replace(DeviceMesh, "_flatten", _flatten)
