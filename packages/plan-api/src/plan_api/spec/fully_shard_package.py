"""The fsdp package, found by entry point and never imported by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

__all__ = ["GROUP", "find_fully_shard", "value_classes"]

GROUP = "plan_api.fully_shard"


def find_fully_shard(what: str) -> Callable[..., Any]:
    """Loads the function that a package has registered as ``plan_api.fully_shard``.

    It is called as ``fully_shard(module, mesh=, reshard_after_forward=)``, with
    ``ignored_params=`` where the plan itself shards parameters along the mesh's axes, with
    ``placements=``, ``mp_policy=``, ``offload_policy=`` and ``send_dtype=`` where the entry has
    them, and with
    ``shard_placement_fn=`` and ``quantize_fn=`` where it has a granularity or quantizes: these
    return the value of a parameter, or None. The classes of such values are in its attributes
    ``granularities`` and ``quantizations``, dataclasses of numbers, flags and dtypes.

    Its ``check(placements=, reshard_after_forward=, ndim=, ranks=, other_axes=)``, if it has one,
    with ``send_dtype=`` where the entry has one, raises ValueError for options that it or the axes
    refuse: ``ndim`` is the number of the mesh's axes,
    ``ranks`` that of the ranks over which one copy is sharded, and ``other_axes`` has the names of
    the axes that the plan has beside them. Its ``check_values(name, param, placements, ranks,
    granularity=, quantize=)`` raises for values that a parameter cannot have, which has these
    placements on other axes of so many ranks. ``quantize_fn`` may also return a
    `GatheredOperand`, of blocks that no rank boundary may split; ``keeps_blocks(granularity,
    block, shape)`` says whether a granularity splits none.

    Static mode adds ``grad_placements_fn=``, which returns the placements of a parameter's gradient
    (modules compute with its local tensor then), or None (with the DTensor). ``unsharded(model)``
    is a context manager in which all parameters of the model are gathered, and no gradients are
    reduced.

    Args:
        what: asks for it, for messages.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    found = _registered(tuple(sys.path))
    if found is None:
        raise ModuleNotFoundError(
            f"{what}: no package offers fully_shard (entry point {GROUP!r}): "
            f"pip install fsdp; or place parameters by phases, shard(..., phase=Phase.RUN)"
        )
    return found


def value_classes(what: str, option: str) -> tuple[type[Any], ...]:
    """Returns the classes that values of ``granularity`` or ``quantize`` may have.

    Args:
        what: asks for them, for messages.
        option: one of both.

    Raises:
        ModuleNotFoundError: no package is installed.
    """
    attribute = {"granularity": "granularities", "quantize": "quantizations"}[option]
    classes: tuple[type[Any], ...] = getattr(find_fully_shard(what), attribute, ())
    return classes


@functools.cache  # of a search through the metadata of all installed packages
def _registered(_path: tuple[str, ...]) -> Callable[..., Any] | None:
    for point in entry_points(group=GROUP):
        found: Callable[..., Any] = point.load()
        return found
    return None
