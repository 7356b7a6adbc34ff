"""Gathers and reduces flat pieces of any sizes, with the fewest bytes that the backend allows.

gloo does not gather or scatter unequal pieces, and NCCL uses point-to-point messages for them. So
unequal pieces are sent by one all-to-all, and a single rank's piece by a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from ragged_shard import _compat

#: A group, as torch's functional collectives take it.
Group = dist.ProcessGroup | tuple[DeviceMesh, int]

_REDUCERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
#: The reduce ops of Partial that `reduce_scatter` supports.
REDUCE_OPS = frozenset({"avg", *_REDUCERS})


def all_gather(
    piece: torch.Tensor, sizes: Sequence[int], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """Gathers the pieces of all ranks of an axis, concatenated in rank order.

    Args:
        piece: flat, this rank's.
        sizes: elements of every rank's piece.
        mesh: of the axis.
        axis: over which to gather.

    Returns:
        a flat tensor of ``sum(sizes)`` elements, which may be an AsyncCollectiveTensor.
    """
    return all_gather_in_group(piece, sizes, (mesh, axis), mesh.get_local_rank(axis))


def all_gather_in_group(
    piece: torch.Tensor, sizes: Sequence[int], group: Group, rank: int
) -> torch.Tensor:
    """Gathers as `all_gather` does, in a process group.

    Args:
        piece: flat, this rank's.
        sizes: elements of every rank's piece.
        group: as torch's functional collectives take it.
        rank: of this process, in the group.

    Returns:
        a flat tensor of ``sum(sizes)`` elements, which may be an AsyncCollectiveTensor.
    """
    if len(set(sizes)) == 1:
        return _compat.all_gather(piece, 0, group)
    owners = [other for other, size in enumerate(sizes) if size]
    if len(owners) == 1:
        [owner] = owners
        full = piece if rank == owner else piece.new_empty(sum(sizes))
        return _compat.broadcast(full, owner, group)
    count = len(sizes)
    input_sizes = [piece.numel()] * count
    return funcol.all_to_all_single(piece.repeat(count), list(sizes), input_sizes, group)


def reduce_scatter(
    pieces: torch.Tensor, sizes: Sequence[int], op: str, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """Reduces pieces over the ranks of an axis; returns this rank's piece.

    Args:
        pieces: every rank's piece, concatenated in rank order.
        sizes: elements of every rank's piece.
        op: one of `REDUCE_OPS`.
        mesh: of the axis.
        axis: over which to reduce.

    Returns:
        a flat tensor, which may be an AsyncCollectiveTensor. Unequal pieces are summed in rank
        order.
    """
    group, count = (mesh, axis), len(sizes)
    if op == "avg":  # gloo has no average
        return reduce_scatter(pieces, sizes, "sum", mesh, axis) / count
    if len(set(sizes)) == 1:
        return _compat.reduce_scatter(pieces, op, 0, group)
    mine = sizes[mesh.get_local_rank(axis)]
    received = funcol.all_to_all_single(pieces, [mine] * count, list(sizes), group)
    return _REDUCERS[op](received.view(count, mine))
