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

    Values are copied into the buffer; where device or dtype changed, into a new one.

    Raises:
        RuntimeError: one is no DTensor of our placements; several dtypes in one group.
    """
    current: list[Any] = [registered(param) for param in group.params]
    locals_ = [now._local_tensor for now in current]
    if all(
        now is param.sharded and local is group.shard.shard(i)
        for i, (param, now, local) in enumerate(zip(group.params, current, locals_, strict=True))
    ):
        return
    dtypes = {local.dtype for local in locals_}
    on_meta = [local.device.type == "meta" for local in locals_]
    if len(dtypes) != 1 or any(on_meta) != all(on_meta):
        raise RuntimeError(
            f"fsdp: {group.names} have become dtypes {sorted(map(str, dtypes))}, some on meta: "
            f"{any(on_meta)}; change all parameters of a group alike"
        )
    (dtype,) = dtypes
    moved = group.shard.device.type == "meta" and not on_meta[0]
    if dtype != group.dtype or moved:
        group.dtype = dtype
        group.shard = group.new_shard(dtype, locals_[0].device)
        group.forget_buffers()
    with torch.no_grad():
        for i, (param, now, local) in enumerate(zip(group.params, current, locals_, strict=True)):
            own = group.shard.shard(i)
            if local is not own:
                if local.device.type != "meta":
                    own.copy_(local)
                now._local_tensor = own
            param.sharded = now
            param.put(param.sharded)


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
