"""Rules of matrix products whose left operand has whole rows, or whose batch is sharded."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate

from ragged_shard.dispatch.operator_call import (
    AxisDecision,
    AxisPlacement,
    OperatorCall,
    TensorOperand,
)
from ragged_shard.dispatch.rules.elementwise import (
    aligned_placement,
    flattened_dims,
    ragged_placement,
)


def product(call: OperatorCall) -> AxisDecision | None:
    """Decides `mm` and `mv`: ragged rows times a replicated operand are ragged rows."""
    left, _ = call.operands
    on_axis = _rows(left)
    if on_axis is None:
        return None
    return AxisDecision((on_axis, AxisPlacement(on_axis.axis, Replicate())), (on_axis,))


def product_added(call: OperatorCall) -> AxisDecision | None:
    """Decides `addmm` and `addmv`: the addend is placed like the product, or broadcast."""
    addend, left, right = call.operands
    on_axis = _rows(left)
    if on_axis is None:
        return None
    shape = (left.shape[0], *right.shape[1:])
    placed = aligned_placement(addend.spec, shape, on_axis)
    if placed is None:
        return None
    return AxisDecision((placed, on_axis, AxisPlacement(on_axis.axis, Replicate())), (on_axis,))


def batched(call: OperatorCall) -> AxisDecision | None:
    """Decides `bmm` and `baddbmm`: the batch of all operands has the same placement."""
    leads = [on_axis for operand in call.operands if (on_axis := _rows(operand)) is not None]
    if not leads:
        return None
    batch = max(operand.shape[0] for operand in call.operands)
    if any(operand.spec.ndim != 3 or operand.shape[0] != batch for operand in call.operands):
        return None
    [*_, lead] = leads
    return AxisDecision((lead,) * len(call.operands), (lead,))


def dot(call: OperatorCall) -> AxisDecision | None:
    """Decides `dot` and `vdot`: both operands have one placement; the result is Partial."""
    lead = next(found for spec in call.specs if (found := ragged_placement(spec)) is not None)
    return AxisDecision((lead, lead), (AxisPlacement(lead.axis, Partial("sum")),))


def _rows(operand: TensorOperand) -> AxisPlacement | None:
    on_axis = ragged_placement(operand.spec)
    if on_axis is None or flattened_dims(on_axis.placement) > 1:
        return None
    return on_axis
