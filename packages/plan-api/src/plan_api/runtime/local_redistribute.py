"""Redistributes local tensors along one axis, with the collectives of `DTensor.redistribute`.

Results are bitwise those of DTensor, and so are the bytes sent: where the ranks do not divide a
dim, shards are padded to the first rank's for the collective, and unpadded afterwards. All other
arguments of the collective are computed in advance, so that a call is the collective and nothing
else.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.runtime.local_shards import chunk_length, chunk_offset
from plan_api.spec.placements import format_placement

__all__ = ["LocalRedistribution", "local_redistribution"]


class LocalRedistribution(Protocol):
    """Redistributes a local tensor along one axis."""

    def __call__(self, tensor: torch.Tensor, length: int | None = None) -> torch.Tensor:
        """Returns the redistributed local tensor.

        Args:
            tensor: this rank's.
            length: of the dim that is sharded before, on all ranks along the axis together, which
                a local tensor does not tell (`ShardSizes`); None: all shards are as long as this
                one, or no dim is sharded before.
        """


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
                _reduce_scatter, dim=dst.dim, op=src.reduce_op, size=size, rank=rank, group=name
            )
    if type(src) is Shard:
        if type(dst) is Replicate:
            return partial(_all_gather, dim=src.dim, size=size, group=name)
        if type(dst) is Shard:
            return partial(_all_to_all, old=src.dim, new=dst.dim, size=size, rank=rank, group=name)
    if type(src) is Replicate:
        if type(dst) is Shard:
            return partial(_shard, dim=dst.dim, size=size, rank=rank)
        if type(dst) is Partial and dst.reduce_op == "sum":
            return partial(_share, by=size)
    raise ValueError(
        f"{what}: static mode cannot redistribute {format_placement(src)} to "
        f"{format_placement(dst)}: use mode='eager'"
    )


def _shard(
    tensor: torch.Tensor, length: int | None = None, *, dim: int, size: int, rank: int
) -> torch.Tensor:
    whole = tensor.shape[dim]
    part = tensor.narrow(dim, chunk_offset(whole, size, rank), chunk_length(whole, size, rank))
    return part.clone(memory_format=torch.contiguous_format)


def _all_reduce(
    tensor: torch.Tensor, length: int | None = None, *, op: str, group: str
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), op, group))  # type: ignore[no-any-return]


def _all_gather(
    tensor: torch.Tensor, length: int | None = None, *, dim: int, size: int, group: str
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    if length is not None:
        tensor = _padded(tensor, dim, chunk_length(length, size, 0))
    gathered: torch.Tensor = ops.wait_tensor(
        ops.all_gather_into_tensor(tensor.contiguous(), size, group)
    )
    whole = gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)
    return whole if length is None else whole.narrow(dim, 0, length).contiguous()


def _reduce_scatter(
    tensor: torch.Tensor,
    length: int | None = None,
    *,
    dim: int,
    op: str,
    size: int,
    rank: int,
    group: str,
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    whole = tensor.shape[dim]
    tensor = _padded(tensor, dim, chunk_length(whole, size, 0) * size)
    rows = tensor.contiguous() if dim == 0 else torch.cat(tensor.chunk(size, dim))
    scattered: torch.Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(rows, op, size, group))
    return scattered if whole % size == 0 else _own_chunk(scattered, dim, whole, size, rank)


def _all_to_all(
    tensor: torch.Tensor,
    length: int | None = None,
    *,
    old: int,
    new: int,
    size: int,
    rank: int,
    group: str,
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    whole = tensor.shape[new]
    if length is not None:
        tensor = _padded(tensor, old, chunk_length(length, size, 0))
    tensor = _padded(tensor, new, chunk_length(whole, size, 0) * size)
    # One row per rank: its part of this rank's shard.
    rows = torch.stack(tensor.chunk(size, new))
    ones = [1] * size
    received = ops.wait_tensor(ops.all_to_all_single(rows, ones, ones, group))
    moved = torch.cat(received.unbind(0), old)
    if length is not None:
        moved = moved.narrow(old, 0, length)
    return moved if whole % size == 0 else _own_chunk(moved, new, whole, size, rank)


def _share(tensor: torch.Tensor, length: int | None = None, *, by: int) -> torch.Tensor:
    return tensor / by


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Appends zeros to a dim: to the last of all shards, or to a shard that is shorter."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    return F.pad(tensor, [0, 0] * (tensor.ndim - dim - 1) + [0, missing])


def _own_chunk(padded: torch.Tensor, dim: int, whole: int, size: int, rank: int) -> torch.Tensor:
    return padded.narrow(dim, 0, chunk_length(whole, size, rank))
