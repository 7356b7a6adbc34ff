"""Patches torch for the whole process where `parallelize` needs it, and restores it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plan_api._compat import use_rule_for_convolution_backward
from plan_api.ops.attention import register_cpu_attention, use_local_attention
from plan_api.ops.function_calls import remove_redirects
from plan_api.ops.losses import loss_handlers, use_local_losses
from plan_api.ops.normalization import use_local_norms
from plan_api.options import enable_extra
from plan_api.static.operators import use_initializers
from plan_api.static.optimizer import remove_step_hooks

__all__ = ["install_patches", "uninstall_patches"]

_active = ExitStack()
_registered = False


def install_patches(extras: Iterable[str]) -> None:
    """Enables packages, and registers this package's handlers and strategies of operators.

    Args:
        extras: the names of installed packages.
    """
    global _registered
    for name in extras:
        if (disable := enable_extra(name)) is not None:
            _active.callback(disable)
    if not _registered:
        _registered = True
        _active.callback(_register_operators())
        _active.callback(use_local_attention())
        _active.callback(use_local_losses())
        _active.callback(use_local_norms())
        _active.callback(use_initializers())
        _active.callback(remove_redirects)
    # At each call: torch's `loss_parallel` removes the handlers of its operators when it ends.
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(loss_handlers())


def uninstall_patches() -> None:
    """Restores torch, and disables the packages that `install_patches` enabled."""
    global _registered
    _registered = False
    _active.close()
    remove_step_hooks()


def _register_operators() -> Callable[[], None]:
    """Registers handlers and strategies of DTensor operators.

    Returns:
        the inverse, which leaves entries that others have replaced since.
    """
    dispatcher: Any = DTensor._op_dispatcher
    tables = [dispatcher._custom_op_handlers, *_tables(dispatcher.sharding_propagator)]
    before = [dict(table) for table in tables]
    register_cpu_attention()
    use_rule_for_convolution_backward()
    dispatcher._custom_op_handlers.update(loss_handlers())
    registered = [dict(table) for table in tables]

    def restore() -> None:
        for table, old, new in zip(tables, before, registered, strict=True):
            changed = [op for op in {*old, *new} if old.get(op) is not new.get(op)]
            for operator in changed:
                if table.get(operator, new.get(operator)) is not new.get(operator):
                    continue
                table.pop(operator, None)
                if operator in old:
                    table[operator] = old[operator]
        _clear_propagator_caches(dispatcher.sharding_propagator)

    return restore


def _tables(propagator: Any) -> list[dict[Any, Any]]:
    """Returns the propagator's tables by operator, whose names differ between versions of torch."""
    return [
        table for name, table in vars(propagator).items() if type(table) is dict and "op_" in name
    ]


def _clear_propagator_caches(propagator: Any) -> None:
    """Clears what torch has cached of operators' placements on this thread, in Python and C++."""
    clear: Callable[[], None] = propagator.propagate_op_sharding.cache_clear
    clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
