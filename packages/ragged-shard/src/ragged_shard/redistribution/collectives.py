"""Gathering and reducing flat pieces of any size, with the fewest bytes that the backend allows.

gloo refuses gathers and scatters of unequal pieces and NCCL's are point-to-point inside, so unequal
pieces go through one all-to-all, and a single owner's through a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from ragged_shard import _compat

#: What torch's functional collectives take.
Group = dist.ProcessGroup | tuple[DeviceMesh, int]

_REDUCERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    "product": lambda stacked: stacked.prod(0, dtype=stacked.dtype),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}
#: Partial's reduce ops that `reduce_scatter` knows.
REDUCE_OPS = frozenset({"avg", *_REDUCERS})


def all_gather(
    piece: torch.Tensor, sizes: Sequence[int], mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """The pieces of all ranks of an axis, one behind the other in rank order.

    Args:
        piece: flat, this rank's.
        sizes: elements of every rank's piece.
        mesh: that holds the axis.
        axis: over which to gather.

    Returns:
        A flat tensor of ``sum(sizes)`` elements, perhaps still on its way.
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
        A flat tensor of ``sum(sizes)`` elements; an AsyncCollectiveTensor, perhaps.
    """
    if len(set(sizes)) == 1:
        return _compat.all_gather(piece, 0, group)
    holders = [other for other, size in enumerate(sizes) if size]
    if len(holders) == 1:
        [owner] = holders
        whole = piece if rank == owner else piece.new_empty(sum(sizes))
        return _compat.broadcast(whole, owner, group)
    count = len(sizes)
    everywhere = [piece.numel()] * count
    return funcol.all_to_all_single(piece.repeat(count), list(sizes), everywhere, group)


def reduce_scatter(
    pieces: torch.Tensor, sizes: Sequence[int], op: str, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    """This rank's piece, reduced over the ranks of an axis.

    Args:
        pieces: flat: every rank's piece, one behind the other in rank order.
        sizes: elements of every rank's piece.
        op: one of `REDUCE_OPS`.
        mesh: that holds the axis.
        axis: over which to reduce.

    Returns:
        A flat tensor, perhaps still on its way. Unequal pieces are added up in rank order.
    """
    group, count = (mesh, axis), len(sizes)
    if op == "avg":  # gloo has no average
        return reduce_scatter(pieces, sizes, "sum", mesh, axis) / count
    if len(set(sizes)) == 1:
        return _compat.reduce_scatter(pieces, op, 0, group)
    mine = sizes[mesh.get_local_rank(axis)]
    received = funcol.all_to_all_single(pieces, [mine] * count, list(sizes), group)
    return _REDUCERS[op](received.view(count, mine))
