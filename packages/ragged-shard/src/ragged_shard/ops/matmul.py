"""Matrix products whose left operand keeps whole rows, or whose batch is cut."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Replicate

from ragged_shard.ops.conform import beside, cut_dims, ragged_of
from ragged_shard.question import Answer, OnAxis, Operand, Question


def product(question: Question) -> Answer | None:
    """`mm`, `mv`: ragged rows times a replica are ragged rows."""
    left, _ = question.operands
    on_axis = _rows(left)
    if on_axis is None:
        return None
    return Answer((on_axis, OnAxis(on_axis.axis, Replicate())), (on_axis,))


def product_added(question: Question) -> Answer | None:
    """`addmm`, `addmv`: as the product, with an addend that is cut like it or broadcast."""
    addend, left, right = question.operands
    on_axis = _rows(left)
    if on_axis is None:
        return None
    shape = (left.shape[0], *right.shape[1:])
    placed = beside(addend.spec, shape, on_axis)
    if placed is None:
        return None
    return Answer((placed, on_axis, OnAxis(on_axis.axis, Replicate())), (on_axis,))


def batched(question: Question) -> Answer | None:
    """`bmm`, `baddbmm`: the batch of every operand cut alike."""
    leads = [on_axis for operand in question.operands if (on_axis := _rows(operand)) is not None]
    if not leads:
        return None
    batch = max(operand.shape[0] for operand in question.operands)
    if any(operand.spec.ndim != 3 or operand.shape[0] != batch for operand in question.operands):
        return None
    [*_, lead] = leads
    return Answer((lead,) * len(question.operands), (lead,))


def dot(question: Question) -> Answer | None:
    """`dot`, `vdot`: both cut alike; every rank has a part of the sum."""
    lead = next(found for spec in question.specs if (found := ragged_of(spec)) is not None)
    return Answer((lead, lead), (OnAxis(lead.axis, Partial("sum")),))


def _rows(operand: Operand) -> OnAxis | None:
    on_axis = ragged_of(operand.spec)
    if on_axis is None or cut_dims(on_axis.placement) > 1:
        return None
    return on_axis
