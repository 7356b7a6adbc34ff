"""What is private in torch, and may differ between the supported versions."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torch_comms
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

__all__ = [
    "AllGather",
    "ReduceScatter",
    "comms_of_process_group",
    "comms_of_symmetric_memory",
    "default_reduce_dtype",
    "placement_and_mesh",
    "policy_of",
    "tell_torch",
]

_REDUCES_IN_PARAMETERS_DTYPE = hasattr(MixedPrecisionPolicy, "_resolve_for_param")


def tell_torch(module: nn.Module, state: object) -> None:
    """Lets ``torch.distributed.fsdp.fully_shard.state(module)`` find our state.

    torch's pipeline stages ask it for the states below a stage, to reduce after the last
    microbatch; and torch's own fully_shard refuses the module then.
    """
    registry = module.__dict__.setdefault(STATE_KEY, {})
    registry[torch_fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def comms_of_process_group(group: dist.ProcessGroup) -> tuple[AllGather, ReduceScatter]:
    """Torch's collectives whose memory is what a process group's backend allocates, if it does."""
    gather: AllGather = torch_comms.ProcessGroupAllocAllGather(group)
    return gather, torch_comms.ProcessGroupAllocReduceScatter(group)


def comms_of_symmetric_memory(
    group: dist.ProcessGroup, backend: Any
) -> tuple[AllGather, ReduceScatter]:
    """Torch's collectives on symmetric memory; every rank of the group has to call.

    Raises:
        RuntimeError: this torch has none.
    """
    if not hasattr(torch_comms, "SymmMemAllGather"):
        raise RuntimeError(
            "set_symm_mem_for_comm: this torch has no such collectives; wants 2.12 or newer"
        )
    gather: AllGather = torch_comms.SymmMemAllGather(group, backend)
    return gather, torch_comms.SymmMemReduceScatter(group, backend)


def placement_and_mesh(result: Any, mesh: DeviceMesh, name: str) -> tuple[Any, DeviceMesh]:
    """What a ``shard_placement_fn`` returned, torch's ``ShardPlacementResult`` taken apart.

    Args:
        result: that, of a placement and a mesh info; or a placement.
        mesh: of what says none.
        name: of the parameter, for errors.

    Raises:
        ValueError: a mesh whose last axis is not the one that shards.
    """
    info = getattr(result, "mesh_info", None)
    if info is None:
        return result, mesh
    if info.shard_mesh_dim != info.mesh.ndim - 1:
        raise ValueError(
            f"fully_shard: shard_placement_fn gave {name!r} a mesh that is sharded along axis "
            f"{info.shard_mesh_dim} of {info.mesh.ndim}; wants the last"
        )
    return result.placement, info.mesh


def default_reduce_dtype(dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """What ``reduce_dtype=None`` means: since 2.15 the parameters' dtype, before what computes."""
    return dtype if _REDUCES_IN_PARAMETERS_DTYPE else compute_dtype


def policy_of(param: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """A policy as it is for one parameter; since 2.15 its dtype may depend on it."""
    resolve = getattr(policy, "_resolve_for_param", None)
    resolved: MixedPrecisionPolicy = policy if resolve is None else resolve(param)
    return resolved
