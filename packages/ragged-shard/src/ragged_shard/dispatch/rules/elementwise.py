"""Rules of elementwise operators: all operands and the result have the ragged one's placement."""

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
    """Returns the ragged placement of a spec, with its axis; None if it has none."""
    axis = ragged_axis(spec.placements)
    return None if axis is None else AxisPlacement(axis, spec.placements[axis])


def flattened_dims(ragged: Placement) -> int:
    """Returns the number of leading dims that are a single dim of the local tensors."""
    assert isinstance(ragged, RaggedShard)
    return max(len(ragged.dims), 1)


def aligned_placement(
    operand: DTensorSpec, shape: Sequence[int], lead: AxisPlacement
) -> AxisPlacement | None:
    """Finds the placement of an operand with which local broadcasting equals global broadcasting.

    Args:
        operand: any operand of the operator.
        shape: of the result.
        lead: the ragged placement of an operand that has the result's leading dims.

    Returns:
        the lead's placement for an operand with the same leading dims, Replicate for one that is
        broadcast over them, None if local shapes would not match.
    """
    own, flattened = tuple(tensor_meta_of(operand).shape), flattened_dims(lead.placement)
    if len(own) == len(shape) and own[:flattened] == tuple(shape[:flattened]):
        return lead
    replicated = AxisPlacement(lead.axis, Replicate())
    if len(own) <= max(len(shape) - flattened, 0):
        return replicated
    if flattened == 1 and len(own) == len(shape) and own[0] == 1:
        return replicated
    return None


def align_operands(
    operands: Sequence[DTensorSpec], lead: AxisPlacement
) -> tuple[AxisPlacement | None, ...] | None:
    """Returns the placements of all operands with a ragged lead; None if one cannot be aligned."""
    shape = torch.broadcast_shapes(*(tensor_meta_of(operand).shape for operand in operands))
    placed = tuple(aligned_placement(operand, shape, lead) for operand in operands)
    return None if None in placed or lead not in placed else placed


def pointwise(call: OperatorCall) -> AxisDecision | None:
    """Decides an operator with one result, which has the shape of the ragged operand.

    An in-place operator takes the placement of its first argument; if that is not ragged, ragged
    operands are redistributed to it.
    """
    lead = _lead(call)
    if lead is None:
        return None
    on_axis = ragged_placement(lead)
    if on_axis is None:  # in place on a native tensor: ragged operands are gathered, and torch
        decided_by_torch = tuple(None for _ in call.specs)  # shards them as the target requires
        return AxisDecision(decided_by_torch, (None,))
    placed = align_operands(call.specs, on_axis)
    return None if placed is None else AxisDecision(placed, (on_axis,), elementwise=True)


def masked_put(call: OperatorCall) -> AxisDecision | None:
    """Decides `index_put_`: elementwise for one mask of the tensor's shape, ``x[mask] = 0``."""
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
    """Decides `_foreach_*` and `_fused_*`: tensors are placed like the first list's, by index.

    Torch decides indices without a ragged tensor. Tensors outside of lists (a learning rate, a
    scale) are replicated.
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
