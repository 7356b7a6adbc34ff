"""Local tensors moved from one placement to another along one axis, as DTensor moves its own.

The collectives are those of `DTensor.redistribute`, with the same bits; what they need to know is
said when the move is made, so that a call is the collective and nothing else. Shards are even:
of uneven ones a local tensor does not know its whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.lowering.ir import short

__all__ = ["LocalMove", "even_part", "local_move"]

LocalMove: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_REDUCTIONS = ("sum", "avg", "max", "min")


def local_move(src: Placement, dst: Placement, mesh: DeviceMesh, axis: int, what: str) -> LocalMove:
    """What makes a local tensor placed as ``src`` along an axis one placed as ``dst``.

    Args:
        src: Replicate, Shard or Partial; another one than ``dst``.
        dst: the same kinds.
        mesh: all ranks along the axis call alike.
        axis: by number.
        what: of the tensor, for messages.

    Raises:
        ValueError: there is no such move of local tensors.
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
            return partial(even_part, dim=dst.dim, size=size, rank=rank, what=what)
        if type(dst) is Partial and dst.reduce_op == "sum":
            return partial(_share, by=size)
    raise ValueError(
        f"{what}: static mode cannot move {short(src)} to {short(dst)}: use mode='eager'"
    )


def even_part(tensor: torch.Tensor, dim: int, size: int, rank: int, what: str) -> torch.Tensor:
    """This rank's part of a tensor that all have.

    Raises:
        ValueError: it cannot be cut evenly.
    """
    _check_even(tensor, dim, size, what)
    length = tensor.shape[dim] // size
    part = tensor.narrow(dim, rank * length, length)
    return part.clone(memory_format=torch.contiguous_format)


def _check_even(tensor: torch.Tensor, dim: int, size: int, what: str) -> None:
    if tensor.shape[dim] % size:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)}, and its dim {dim} is to be cut into {size}: "
            f"in static mode shards are even; pad it, or use mode='eager'"
        )


def _all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), op, group))  # type: ignore[no-any-return]


def _all_gather(tensor: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    whole: torch.Tensor = ops.wait_tensor(
        ops.all_gather_into_tensor(tensor.contiguous(), size, group)
    )
    return whole if dim == 0 else torch.cat(whole.chunk(size), dim)


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
    # One row a rank: what it will have of this rank's shard.
    rows = torch.stack(tensor.chunk(size, new))
    ones = [1] * size
    come = ops.wait_tensor(ops.all_to_all_single(rows, ones, ones, group))
    return torch.cat(come.unbind(0), old)


def _share(tensor: torch.Tensor, by: int) -> torch.Tensor:
    return tensor / by
