"""Switching the library on and off, for the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# _compat comes first: it refuses a torch that _core was not compiled for.
from dtensor_rules import _compat, _core, patches, results  # noqa: F401
from dtensor_rules.inspect import checking, logs
from dtensor_rules.planning import operators, planner
from dtensor_rules.registry import table
from dtensor_rules.registry.builtin import BUILTIN

_on = False


def enable() -> None:
    """Sends DTensor operators through the library from here on; a second call does nothing.

    On all ranks, or on none: where a process has made two equal meshes, torch takes process groups
    of the first that it has cached, the library those of the tensor's own, and ranks that differ
    wait for one another for ever.

    What it replaces in torch, until `disable`:

    - the kernels of operators on DTensors, and those of the functional all-gathers of CPU tensors;
    - ``DTensor.from_local``, ``to_local``, ``redistribute`` and attributes, ``OpDispatcher.wrap``;
    - ``expand_to_full_mesh_op_strategy``, wherever it was imported, by `expansion.expand`, and what
      sharding propagation infers results by (`inference`);
    - ``_optimize_transform_infos``, by which redistributions are merged, by
      `gathers.merge_transforms`, and ``_gen_transform_infos_non_cached``, whose results get the
      shape of the tensor;
    - what changes decisions and plans, which it listens to: registrations of strategies, the
      clearing of caches, ``DTensorSpec.__setattr__``, ``DeviceMesh._flatten``, the end of process
      groups.

    With DTENSOR_RULES_CHECK=1 in the environment every call is made by torch as well, and compared.

    Raises:
        RuntimeError: torch is not as expected; nothing has been installed then.
        ValueError: DTENSOR_RULES_CHECK is neither 0 nor 1, or DTENSOR_RULES_LOGS names what is no
            log.
    """
    global _on
    if _on:
        return
    try:
        _core.find_torch_classes()
        _core.set_planner(planner.plan)
        _core.set_checker(checking.check if checking.wanted() else None)
        logs.configure()
        _core.set_fallback_logger(logs.left)
        patches.install()
        if not checking.wanted():  # there the native call is torch's in every part
            results.install()
        operators.install_kernels(table.registered())
        _core.set_cpu_gathers(True)
        _core.set_attribute_answered(True)
    except BaseException:
        _remove()
        raise
    _on = True


def disable() -> None:
    """Gives DTensor operators back to torch, as if the library had never been enabled."""
    global _on
    _remove()
    _on = False


def is_enabled() -> bool:
    """Whether DTensor operators go through the library."""
    return _on


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Enables the library for a block; one that was enabled before stays so after."""
    before = _on
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def _remove() -> None:
    _core.set_attribute_answered(False)
    _core.set_cpu_gathers(False)
    _core.remove_kernels()
    _core.set_checker(None)
    _core.set_fallback_logger(None)
    results.remove()
    patches.remove()
    _core.cache_clear()
    _core.clear_specs()


for _rule in BUILTIN:
    table.register_rule(_rule)
