"""Operators on lists of tensors, as optimizers use them: each index is a pointwise operator."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from ragged_shard.ops.conform import beside, ragged_of
from ragged_shard.question import Answer, OnAxis, Operand, Question


def foreach(question: Question) -> Answer | None:
    """`_foreach_*` and `_fused_*`: the tensors of the first list lead those of the other lists.

    Indices without a ragged tensor are stock's. Tensors outside lists (a learning rate, a scale)
    are replicated.
    """
    leads = [operand for operand in question.operands if operand.argument == 0]
    inputs: list[OnAxis | None] = []
    for operand in question.operands:
        if operand.item is None:
            inputs.append(_replicated(leads))
            continue
        lead = leads[operand.item]
        on_axis = ragged_of(lead.spec)
        placed = None if on_axis is None else beside(operand.spec, lead.shape, on_axis)
        if on_axis is not None and placed is None:
            return None
        inputs.append(placed)
    outputs = tuple(ragged_of(lead.spec) for lead in leads)
    return Answer(tuple(inputs), outputs, elementwise=True)


def _replicated(leads: list[Operand]) -> OnAxis | None:
    axes = {on_axis.axis for lead in leads if (on_axis := ragged_of(lead.spec)) is not None}
    return OnAxis(axes.pop(), Replicate()) if len(axes) == 1 else None
