"""How the other operands of an elementwise operator must be placed beside a ragged one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.question import OnAxis
from ragged_shard.ragged import RaggedShard
from ragged_shard.spec import meta_of, ragged_axis


def ragged_of(spec: DTensorSpec) -> OnAxis | None:
    """The ragged placement of a spec, with its axis."""
    axis = ragged_axis(spec.placements)
    return None if axis is None else OnAxis(axis, spec.placements[axis])


def cut_dims(ragged: Placement) -> int:
    """How many leading dims of the tensor are one dim, of any size, in the local tensors."""
    assert isinstance(ragged, RaggedShard)
    return max(len(ragged.dims), 1)


def beside(operand: DTensorSpec, shape: Sequence[int], lead: OnAxis) -> OnAxis | None:
    """How an operand must be placed on the lead's axis for local broadcasting to be the global one.

    Args:
        operand: any operand of the operator.
        shape: of the result.
        lead: the ragged placement of an operand that has the result's leading dims.

    Returns:
        The lead's placement for an operand with the same leading dims, Replicate for one that is
        broadcast over them, None where the pieces do not line up.
    """
    own, cut = tuple(meta_of(operand).shape), cut_dims(lead.placement)
    if len(own) == len(shape) and own[:cut] == tuple(shape[:cut]):
        return lead
    replicated = OnAxis(lead.axis, Replicate())
    if len(own) <= max(len(shape) - cut, 0):
        return replicated
    if cut == 1 and len(own) == len(shape) and own[0] == 1:
        return replicated
    return None


def aligned(operands: Sequence[DTensorSpec], lead: OnAxis) -> tuple[OnAxis | None, ...] | None:
    """The placements of all operands beside a ragged lead; None where one does not line up."""
    shape = torch.broadcast_shapes(*(meta_of(operand).shape for operand in operands))
    placed = tuple(beside(operand, shape, lead) for operand in operands)
    return None if None in placed or lead not in placed else placed
