"""Elementwise operators: every operand cut as the ragged one, the result too."""

from __future__ import annotations

import math

from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard.ops.conform import aligned, ragged_of
from ragged_shard.question import Answer, Question


def pointwise(question: Question) -> Answer | None:
    """One tensor out, of the shape of the ragged operand.

    In place, the first argument leads, whatever its placement: where it is not ragged, ragged
    operands come to it.
    """
    lead = _lead(question)
    if lead is None:
        return None
    on_axis = ragged_of(lead)
    if on_axis is None:  # in place on a tensor of stock's: what is ragged is gathered, and stock
        nothing = tuple(None for _ in question.specs)  # cuts it as the target needs it
        return Answer(nothing, (None,))
    placed = aligned(question.specs, on_axis)
    return None if placed is None else Answer(placed, (on_axis,), elementwise=True)


def masked_put(question: Question) -> Answer | None:
    """`index_put_` with one mask of the tensor's shape, ``x[mask] = scalar``: elementwise."""
    target, *indices, value = question.operands
    if len(indices) != 1 or value.shape.numel() != 1 or indices[0].shape != target.shape:
        return None
    return pointwise(question)


def _lead(question: Question) -> DTensorSpec | None:
    if question.in_place or question.op._schema.is_mutable:
        written = question.args[0] if question.in_place else question.specs[-1]
        return written if isinstance(written, DTensorSpec) else None
    ragged = [spec for spec in question.specs if ragged_of(spec) is not None]
    return max(ragged, key=lambda spec: (spec.ndim, math.prod(spec.shape)))
