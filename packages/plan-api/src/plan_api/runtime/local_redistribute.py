"""Redistributes local tensors along one axis, with the collectives of `DTensor.redistribute`.

Results are bitwise those of DTensor. All arguments of the collective are computed in advance, so
that a call is the collective and nothing else. Shards are even: a local tensor of uneven shards
does not know its global size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.spec.placements import format_placement

__all__ = ["LocalRedistribution", "even_shard", "local_redistribution"]

LocalRedistribution: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_REDUCTIONS = ("sum", "avg", "max", "min")


def local_redistribution(
    src: Placement, dst: Placement, mesh: DeviceMesh, axis: int, what: str
) -> LocalRedistribution:
    """Makes a function that redistributes a local tensor from ``src`` to ``dst`` along an axis.

    Args:
        src: Replicate, Shard or Partial, different from ``dst``.
        dst: the same kinds.
        mesh: all ranks along the axis have to call the function.
        axis: its number.
        what: names the tensor in messages.

    Raises:
        ValueError: there is no such redistribution of local tensors.
    """
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    name = mesh.get_group(axis).group_name
    if isinstance(src, Partial) and src.reduce_op in _REDUCTIONS:
        if type(dst) is Replicate:
            return partial(_all_reduce, op=src.reduce_op, group=name)
        if type(dst) is Shard:
            return partial(
                _reduce_scatter, dim=dst.dim, op=src.reduce_op, size=size, group=name, what=what
            )
    if type(src) is Shard:
        if type(dst) is Replicate:
            return partial(_all_gather, dim=src.dim, size=size, group=name)
        if type(dst) is Shard:
            return partial(_all_to_all, old=src.dim, new=dst.dim, size=size, group=name, what=what)
    if type(src) is Replicate:
        if type(dst) is Shard:
            return partial(even_shard, dim=dst.dim, size=size, rank=rank, what=what)
        if type(dst) is Partial and dst.reduce_op == "sum":
            return partial(_share, by=size)
    raise ValueError(
        f"{what}: static mode cannot redistribute {format_placement(src)} to "
        f"{format_placement(dst)}: use mode='eager'"
    )


def even_shard(tensor: torch.Tensor, dim: int, size: int, rank: int, what: str) -> torch.Tensor:
    """Returns this rank's shard of a tensor that all ranks have.

    Raises:
        ValueError: the size does not divide the dim.
    """
    _check_even(tensor, dim, size, what)
    length = tensor.shape[dim] // size
    part = tensor.narrow(dim, rank * length, length)
    return part.clone(memory_format=torch.contiguous_format)


def _check_even(tensor: torch.Tensor, dim: int, size: int, what: str) -> None:
    if tensor.shape[dim] % size:
        raise ValueError(
            f"{what}: expected a dim {dim} that {size} ranks divide evenly, as static mode needs, "
            f"got shape {tuple(tensor.shape)}; pad it, or use mode='eager'"
        )


def _all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), op, group))  # type: ignore[no-any-return]


def _all_gather(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    gathered: torch.Tensor = ops.wait_tensor(
        ops.all_gather_into_tensor(tensor.contiguous(), size, group)
    )
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)


def _reduce_scatter(
    tensor: torch.Tensor, dim: int, op: str, size: int, group: str, what: str
) -> torch.Tensor:
    _check_even(tensor, dim, size, what)
    ops = torch.ops._c10d_functional
    rows = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(size, dim))
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, op, size, group))  # type: ignore[no-any-return]


def _all_to_all(
    tensor: torch.Tensor, old: int, new: int, size: int, group: str, what: str
) -> torch.Tensor:
    _check_even(tensor, new, size, what)
    ops = torch.ops._c10d_functional
    # One row per rank: its part of this rank's shard.
    rows = torch.stack(tensor.chunk(size, new))
    ones = [1] * size
    received = ops.wait_tensor(ops.all_to_all_single(rows, ones, ones, group))
    return torch.cat(received.unbind(0), old)


def _share(tensor: torch.Tensor, by: int) -> torch.Tensor:
    return tensor / by
