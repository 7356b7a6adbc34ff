"""Parameters that others put in place of ours: ``to_empty``, ``to``, ``half``, loaded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from fsdp.parameter import ManagedParameter
    from fsdp.planned import PlannedGroup

__all__ = ["adopt", "describe", "registered"]


def adopt(group: PlannedGroup) -> None:
    """Makes the parameters that modules have now views of the group's SHARD buffer.

    Values are copied into the buffer; where device or dtype changed, into a new one. Parameters on
    meta stay there, as `load_state_dict` and a module-wide change bring one module after another;
    so do those of several dtypes, until all have one.

    Raises:
        RuntimeError: one is not a DTensor with this package's placements.
    """
    current: list[Any] = [registered(param) for param in group.params]
    if all(
        now is param.sharded and param.is_everywhere(now) and _is_own(group, i, now)
        for i, (param, now) in enumerate(zip(group.params, current, strict=True))
    ):
        group.mixed_dtypes = ()
        return
    arrived = [now._local_tensor for now in current if now.device.type != "meta"]
    dtypes = {local.dtype for local in arrived or [now._local_tensor for now in current]}
    group.mixed_dtypes = tuple(sorted(map(str, dtypes))) if len(dtypes) > 1 else ()
    if group.mixed_dtypes:
        return
    (dtype,) = dtypes
    moved = group.shard.device.type == "meta" and bool(arrived)
    if dtype != group.dtype or moved:
        group.dtype = dtype
        group.shard = group.new_shard(dtype, (arrived or [current[0]._local_tensor])[0].device)
        group.forget_buffers()
    with torch.no_grad():
        for i, (param, now) in enumerate(zip(group.params, current, strict=True)):
            local, own = now._local_tensor, group.shard.shard(i)
            if local.device.type != "meta" or group.shard.device.type == "meta":
                if local is not own and local.device.type != "meta":
                    own.copy_(local)
                now._local_tensor = own
            param.sharded = now
            param.put(param.sharded)


def _is_own(group: PlannedGroup, i: int, now: Any) -> bool:
    """Whether a parameter has its part of the buffer, or is still awaited on meta."""
    awaited = now.device.type == "meta" and group.shard.device.type != "meta"
    return awaited or now._local_tensor is group.shard.shard(i)


def registered(param: ManagedParameter) -> DTensor:
    """What modules have of a parameter now.

    Raises:
        RuntimeError: it is no DTensor that is placed as ours.
    """
    now: Any = param.registered()
    wanted: Any = param.sharded
    if not isinstance(now, DTensor) or now.placements != wanted.placements:
        raise RuntimeError(
            f"fsdp: parameter {param.name!r} was replaced after fully_shard, by "
            f"{describe(now)}; wants a DTensor placed as it was: change values in place, or "
            f"replace it before fully_shard"
        )
    return now


def describe(value: object) -> str:
    """An object that should have been a parameter of ours, in few words."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return repr(value)
