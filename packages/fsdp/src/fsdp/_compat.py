"""Private parts of torch, and what differs between the supported versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torch_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.utils import _apply_to_tensors as map_tensors

__all__ = [
    "AllGather",
    "DataParallelMeshDims",
    "GradDtype",
    "GradientReductionHandle",
    "ReduceScatter",
    "canonical_names",
    "check_ordered_groups",
    "collectives_of_process_group",
    "collectives_of_symmetric_memory",
    "default_reduce_dtype",
    "grad_dtype_of",
    "in_backward",
    "map_tensors",
    "no_compile",
    "ordered_group",
    "placement_and_mesh",
    "policy_of",
    "set_grad_dtype",
]

P = ParamSpec("P")
R = TypeVar("R")

_REDUCES_IN_SHARDED_DTYPE = hasattr(MixedPrecisionPolicy, "_resolve_for_param")


if hasattr(torch_fsdp, "GradientReductionHandle"):
    GradientReductionHandle: Any = torch_fsdp.GradientReductionHandle
else:  # before 2.15

    class GradientReductionHandle:  # type: ignore[no-redef]
        """A handle of an asynchronous `FSDPModule.finalize_backward`."""

        def wait(self) -> None:
            """Waits for the reductions."""


if hasattr(torch_fsdp, "DataParallelMeshDims") and not TYPE_CHECKING:
    DataParallelMeshDims = torch_fsdp.DataParallelMeshDims
else:  # before 2.13

    @dataclass(frozen=True)
    class DataParallelMeshDims:
        """The axes of a mesh that are those of data parallelism: a name, or several names.

        Attributes:
            shard: the axes along which parameters are sharded.
            replicate: the axes along which they are replicated.
        """

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "At least one of shard or replicate must be set in DataParallelMeshDims"
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            """The axes along which parameters are sharded."""
            return _as_tuple(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            """The axes along which parameters are replicated."""
            return _as_tuple(self.replicate)

    def _as_tuple(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
        return (names,) if isinstance(names, str) else tuple(names or ())


def collectives_of_process_group(group: dist.ProcessGroup) -> tuple[AllGather, ReduceScatter]:
    """Returns torch's collectives in memory that the process group's backend allocates."""
    gather: AllGather = torch_collectives.ProcessGroupAllocAllGather(group)
    return gather, torch_collectives.ProcessGroupAllocReduceScatter(group)


def collectives_of_symmetric_memory(
    group: dist.ProcessGroup, backend: Any
) -> tuple[AllGather, ReduceScatter]:
    """Returns torch's collectives in symmetric memory; every rank of the group has to call.

    Raises:
        RuntimeError: this torch has none.
    """
    if not hasattr(torch_collectives, "SymmMemAllGather"):
        raise RuntimeError(
            f"set_symm_mem_for_comm: expected torch 2.12 or newer, got {torch.__version__}, which "
            f"has no collectives in symmetric memory"
        )
    gather: AllGather = torch_collectives.SymmMemAllGather(group, backend)
    return gather, torch_collectives.SymmMemReduceScatter(group, backend)


def check_ordered_groups() -> None:
    """Refuses a torch that sorts the ranks of every process group.

    Raises:
        ValueError: this is one.
    """
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:  # as 2.11
        raise ValueError(
            f"fully_shard: placements: expected a torch whose process groups keep the order of "
            f"ranks, new_group(sort_ranks=False), to shard the optimizer state over replicas, got "
            f"{torch.__version__}; update torch, or pass placements='hsdp'"
        )


def ordered_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Makes a process group whose ranks are in this order; all of them have to call, no others."""
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), use_local_synchronization=True, sort_ranks=False
    )
    return group


def placement_and_mesh(result: Any, mesh: DeviceMesh, name: str) -> tuple[Any, DeviceMesh]:
    """Splits what a ``shard_placement_fn`` returned, torch's ``ShardPlacementResult`` too.

    Args:
        result: a placement, or a ``ShardPlacementResult`` of a placement and a mesh info.
        mesh: where the result has none.
        name: of the parameter, for errors.

    Raises:
        ValueError: a mesh info of which no axis shards, or one of unnamed axes that are not
            (replicate, shard).
    """
    info = getattr(result, "mesh_info", None)
    if info is None:
        return result, mesh
    if info.shard_mesh_dim is None:
        raise ValueError(
            f"fully_shard: shard_placement_fn: expected an FSDPMeshInfo or HSDPMeshInfo for "
            f"{name!r}, got {type(info).__name__}, along no axis of which parameters are sharded"
        )
    axes = [a for a in (info.replicate_mesh_dim, info.shard_mesh_dim) if a is not None]
    names = info.mesh.mesh_dim_names
    if axes == list(range(info.mesh.ndim)):
        return result.placement, info.mesh
    if names is None:
        raise ValueError(
            f"fully_shard: shard_placement_fn gave {name!r} axes {axes} of a mesh of "
            f"{info.mesh.ndim}; expected mesh_dim_names, by which they are sliced"
        )
    slices = [info.mesh[names[axis]] for axis in axes]  # with the process groups of these axes
    return result.placement, slices[0] if len(slices) == 1 else DeviceMesh._concatenate(slices)


def default_reduce_dtype(dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
    """Returns what ``reduce_dtype=None`` means: the compute dtype, since 2.15 the parameters'."""
    return dtype if _REDUCES_IN_SHARDED_DTYPE else compute_dtype


@dataclass(frozen=True)
class GradDtype:
    """What ``param.grad_dtype`` was set to.

    Attributes:
        dtype: that gradients must have; None accepts any.
    """

    dtype: torch.dtype | None


def grad_dtype_of(param: torch.Tensor) -> GradDtype | None:
    """Returns what ``param.grad_dtype`` was set to; None if it was not, or before 2.15."""
    if not getattr(param, "_has_grad_dtype_override", False):
        return None
    return GradDtype(param.grad_dtype)


def set_grad_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Sets ``param.grad_dtype``; before 2.15, where FSDP2 does not use it, nothing."""
    if hasattr(param, "_has_grad_dtype_override"):
        param.grad_dtype = dtype


def policy_of(param: nn.Parameter, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Returns the policy of one parameter, on whose dtype it may depend since 2.15."""
    resolve = getattr(policy, "_resolve_for_param", None)
    resolved: MixedPrecisionPolicy = policy if resolve is None else resolve(param)
    return resolved


def no_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile from tracing a hook: the graph breaks there."""
    hidden: Callable[P, R] = _disable_dynamo(function)
    return hidden


def in_backward() -> bool:
    """Returns whether autograd's engine runs, as in a recomputation of activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def canonical_names(model: nn.Module, name: str) -> list[str]:
    """Returns the names in DCP's state dicts of a tensor: without those of wrappers."""
    return sorted(_get_fqns(model, name))
