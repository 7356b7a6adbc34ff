"""The fsdp package, found by entry point and never imported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.entry import Entry

__all__ = ["GROUP", "apply_fully_shard", "find_fully_shard"]

GROUP = "plan_api.fully_shard"


def find_fully_shard(entry: Entry) -> Callable[..., Any]:
    """The function that a package has registered as ``plan_api.fully_shard``.

    It is called as ``fully_shard(module, mesh=, granularity=, reshard_after_forward=)``.

    Args:
        entry: that asks for it, for messages.

    Raises:
        ModuleNotFoundError: none is installed.
    """
    for point in entry_points(group=GROUP):
        found: Callable[..., Any] = point.load()
        return found
    raise ModuleNotFoundError(
        f"{entry.said}: no package offers fully_shard (entry point {GROUP!r}): "
        f"pip install fsdp; or place parameters by phases, shard(..., phase=Phase.RUN)"
    )


def apply_fully_shard(model: nn.Module, entries: Mapping[str, Entry], mesh: DeviceMesh) -> None:
    """Applies it to modules, the innermost first, as it wants to be.

    Args:
        model: whose parameters are placed already.
        entries: by module path, the last that names it.
        mesh: the plan's.
    """
    for path in sorted(entries, key=lambda path: -path.count(".") if path else 1):
        entry = entries[path]
        find_fully_shard(entry)(
            model.get_submodule(path), mesh=mesh[entry.axes], **dict(entry.options)
        )
