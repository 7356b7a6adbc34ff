"""Reads a dispatched collective, functional or of c10d: its name, its bytes and its group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils import _pytree as pytree

from plan_api.spec.axes import axis_names

__all__ = [
    "axis_label",
    "collective_name",
    "get_process_group",
    "get_work",
    "payload_bytes",
    "real_tensors",
]

# fsdp.simulate.events has a copy of the names and of `get_process_group`: neither package depends
# on the other.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
# The prefix of an operator's name, without leading underscores, and the collective.
_NAMES = (
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("shard_dim_alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("isend", "send"),
    ("recv", "recv"),
    ("irecv", "recv"),
    ("barrier", "barrier"),
    ("monitored_barrier", "barrier"),
)


def collective_name(func: torch._ops.OpOverload) -> str:
    """Returns the collective that an operator is, as in ``all_gather``; "" if it is none."""
    if func.namespace not in _NAMESPACES:
        return ""
    own = func._schema.name.partition("::")[2].lstrip("_")
    return next((name for start, name in _NAMES if own.startswith(start)), "")


def real_tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in an argument or a result, without FakeTensors, which are not sent."""
    leaves = pytree.tree_leaves(value)
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
    ]


def payload_bytes(args: Sequence[Any], result: Any) -> int:
    """Returns the bytes of the largest argument or result; each may be a list of tensors."""
    parts = (*args, result)
    return max(
        sum(real_tensor.numel() * real_tensor.element_size() for real_tensor in real_tensors(part))
        for part in parts
    )


def get_process_group(func: torch._ops.OpOverload, args: Sequence[Any]) -> dist.ProcessGroup | None:
    """Returns the process group among an operator's arguments, by name or boxed."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if isinstance(value, dist.ProcessGroup):
            return value
        if argument.name == "group_name" and isinstance(value, str):
            return _resolve_process_group(value)  # type: ignore[arg-type]  # a NewType of str
        if str(argument.type).endswith("c10d.ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
    return None


def get_work(result: Any) -> dist.Work | None:
    """Returns the Work in the result of a c10d operator; functional ones return none."""
    last = result[-1] if isinstance(result, (tuple, list)) and result else result
    return dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


def axis_label(group: dist.ProcessGroup, mesh: DeviceMesh | None) -> str:
    """Returns the axis, or the axes joined by "+", whose ranks a group has; "" for none."""
    if mesh is None or mesh.get_coordinate() is None:
        return ""
    names = axis_names(mesh)
    for axis, name in enumerate(names):  # by name first: two axes of size 1 have the same ranks
        if mesh.get_group(axis).group_name == group.group_name:
            return name
    ranks = sorted(dist.get_process_group_ranks(group))
    for axes in _axis_combinations(mesh.ndim):
        if _ranks_along(mesh, axes) == ranks:
            return "+".join(names[axis] for axis in axes)
    return ""


def _axis_combinations(ndim: int) -> Iterator[tuple[int, ...]]:
    for number in range(1, ndim + 1):
        yield from itertools.combinations(range(ndim), number)


def _ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))
    return sorted(mesh.mesh[index].flatten().tolist())
