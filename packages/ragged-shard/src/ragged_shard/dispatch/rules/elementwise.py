"""Elementwise operators: every operand is placed as the ragged one, and so is the result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.dispatch.operator_call import (
    AxisDecision,
    AxisPlacement,
    OperatorCall,
    TensorOperand,
)
from ragged_shard.geometry.specs import ragged_axis, tensor_meta_of
from ragged_shard.ragged import RaggedShard


def ragged_placement(spec: DTensorSpec) -> AxisPlacement | None:
    """The ragged placement of a spec, with its axis."""
    axis = ragged_axis(spec.placements)
    return None if axis is None else AxisPlacement(axis, spec.placements[axis])


def flattened_dims(ragged: Placement) -> int:
    """How many leading dims of the tensor are one dim, of any size, in the local tensors."""
    assert isinstance(ragged, RaggedShard)
    return max(len(ragged.dims), 1)


def aligned_placement(
    operand: DTensorSpec, shape: Sequence[int], lead: AxisPlacement
) -> AxisPlacement | None:
    """How an operand must be placed on the lead's axis for local broadcasting to be the global one.

    Args:
        operand: any operand of the operator.
        shape: of the result.
        lead: the ragged placement of an operand that has the result's leading dims.

    Returns:
        The lead's placement for an operand with the same leading dims, Replicate for one that is
        broadcast over them, None where the pieces do not line up.
    """
    own, cut = tuple(tensor_meta_of(operand).shape), flattened_dims(lead.placement)
    if len(own) == len(shape) and own[:cut] == tuple(shape[:cut]):
        return lead
    replicated = AxisPlacement(lead.axis, Replicate())
    if len(own) <= max(len(shape) - cut, 0):
        return replicated
    if cut == 1 and len(own) == len(shape) and own[0] == 1:
        return replicated
    return None


def align_operands(
    operands: Sequence[DTensorSpec], lead: AxisPlacement
) -> tuple[AxisPlacement | None, ...] | None:
    """The placements of all operands beside a ragged lead; None where one does not line up."""
    shape = torch.broadcast_shapes(*(tensor_meta_of(operand).shape for operand in operands))
    placed = tuple(aligned_placement(operand, shape, lead) for operand in operands)
    return None if None in placed or lead not in placed else placed


def pointwise(call: OperatorCall) -> AxisDecision | None:
    """One tensor out, of the shape of the ragged operand.

    In place, the first argument leads, whatever its placement: where it is not ragged, ragged
    operands are redistributed to it.
    """
    lead = _lead(call)
    if lead is None:
        return None
    on_axis = ragged_placement(lead)
    if on_axis is None:  # in place on a native tensor: ragged operands are gathered, and torch
        nothing = tuple(None for _ in call.specs)  # shards them as the target requires
        return AxisDecision(nothing, (None,))
    placed = align_operands(call.specs, on_axis)
    return None if placed is None else AxisDecision(placed, (on_axis,), elementwise=True)


def masked_put(call: OperatorCall) -> AxisDecision | None:
    """`index_put_` with one mask of the tensor's shape, ``x[mask] = scalar``: elementwise."""
    target, *indices, value = call.operands
    if len(indices) != 1 or value.shape.numel() != 1 or indices[0].shape != target.shape:
        return None
    return pointwise(call)


def _lead(call: OperatorCall) -> DTensorSpec | None:
    if call.in_place or call.op._schema.is_mutable:
        written = call.args[0] if call.in_place else call.specs[-1]
        return written if isinstance(written, DTensorSpec) else None
    ragged = [spec for spec in call.specs if ragged_placement(spec) is not None]
    return max(ragged, key=lambda spec: (spec.ndim, math.prod(spec.shape)))


def foreach(call: OperatorCall) -> AxisDecision | None:
    """`_foreach_*` and `_fused_*`: the tensors of the first list lead those of the other lists.

    Torch decides indices without a ragged tensor. Tensors outside lists (a learning rate, a scale)
    are replicated.
    """
    leads = [operand for operand in call.operands if operand.argument == 0]
    inputs: list[AxisPlacement | None] = []
    for operand in call.operands:
        if operand.item is None:
            inputs.append(_replicated(leads))
            continue
        lead = leads[operand.item]
        on_axis = ragged_placement(lead.spec)
        placed = None if on_axis is None else aligned_placement(operand.spec, lead.shape, on_axis)
        if on_axis is not None and placed is None:
            return None
        inputs.append(placed)
    outputs = tuple(ragged_placement(lead.spec) for lead in leads)
    return AxisDecision(tuple(inputs), outputs, elementwise=True)


def _replicated(leads: list[TensorOperand]) -> AxisPlacement | None:
    axes = {on_axis.axis for lead in leads if (on_axis := ragged_placement(lead.spec)) is not None}
    return AxisPlacement(axes.pop(), Replicate()) if len(axes) == 1 else None
