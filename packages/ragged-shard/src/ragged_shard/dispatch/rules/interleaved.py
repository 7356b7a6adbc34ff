"""Rules of operators with interleaved inputs, which are decided like a Shard where possible.

An interleaved shard has other rows than a Shard of the same dim, but the same number of them (if
its chunks are divided evenly). For operators that treat all rows the same torch decides as for a
Shard.
Operators for which the index of a row matters (views, splits) have rules of their own.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import Replicate

from ragged_shard.dispatch.operator_call import (
    AxisDecision,
    AxisPlacement,
    AxisRule,
    OperatorCall,
    TensorOperand,
)
from ragged_shard.dispatch.rules.interleaved_views import cat, interleaved_placement, split, view
from ragged_shard.geometry.specs import tensor_meta_of
from ragged_shard.interleaved import InterleavedShard
from ragged_shard.random_regions import INITIALIZERS, LIKE

_LIKE = frozenset(
    {
        "_fused_rms_norm",
        "_log_softmax",
        "_softmax",
        "_to_copy",
        "alias",
        "amax",
        "amin",
        "clone",
        "contiguous",
        "detach",
        "empty_like",
        "expand",
        "full_like",
        "lift_fresh",
        "linalg_vector_norm",
        "mean",
        "native_layer_norm",
        "norm",
        "ones_like",
        "permute",
        "prod",
        "squeeze",
        "sum",
        "t",
        "transpose",
        "unsqueeze",
        "zeros_like",
        *LIKE,
    }
)
_POINTWISE = frozenset(
    {"copy_", "equal", "fill_", "masked_fill", "masked_fill_", "where", "zero_", *INITIALIZERS}
)


#: Those of `_LIKE` that need the same number of rows on every rank: for local sizes, means, or
#: because empty shards are refused.
_EVEN = frozenset(
    {
        "amax",
        "amin",
        "expand",
        "linalg_vector_norm",
        "mean",
        "norm",
    }
)


def rule_for(call: OperatorCall) -> AxisRule | None:
    """Returns the rule of an operator for interleaved inputs, or None."""
    if call.op.namespace != "aten":
        return None
    name = call.op._schema.name.removeprefix("aten::")
    if name == "cat":
        return cat
    if name in ("view", "_unsafe_view", "reshape"):
        return view
    if _all_are_shards(call):
        return as_shard
    if name in ("split", "split_with_sizes"):
        return split
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        return product
    if name in _LIKE:
        return like
    if name in ("_foreach_max", "_foreach_norm"):
        return reduced_lists
    if name.startswith(("_foreach_", "_fused_")):
        return elementwise_lists
    if name in _POINTWISE or torch.Tag.pointwise in call.op.tags:
        return elementwise
    return None


def as_shard(call: OperatorCall) -> AxisDecision:
    """Decides all operators whose interleaved inputs have the local tensors of a Shard.

    Torch decides everything; its Shards become InterleavedShards again, for `cat`.
    """
    inputs = tuple(interleaved_placement(operand.spec) for operand in call.operands)
    lead = next(on_axis for on_axis in inputs if on_axis is not None)
    return AxisDecision(inputs, (lead,), as_shard=True)


def like(call: OperatorCall) -> AxisDecision | None:
    """Decides operators of which only the first input is interleaved."""
    found = [interleaved_placement(operand.spec) for operand in call.operands]
    if found[0] is None:
        return None
    uneven = not _even(call.operands[0], found[0])
    if uneven and call.op._schema.name.removeprefix("aten::") in _EVEN:
        return None
    if any(other is not None for other in found[1:]) and call.operands[0].item is None:
        return None
    axis = found[0].axis
    inputs = tuple(on_axis or AxisPlacement(axis, Replicate()) for on_axis in found)
    return AxisDecision(inputs, (found[0],), as_shard=True) if _one_kind(found) else None


def elementwise(call: OperatorCall) -> AxisDecision | None:
    """Decides elementwise operators: all operands are placed like the interleaved one."""
    lead = call.operands[0]
    if not call.in_place:
        interleaved = [o for o in call.operands if interleaved_placement(o.spec) is not None]
        lead = max(interleaved, key=lambda operand: operand.spec.ndim)
    on_axis = interleaved_placement(lead.spec)
    if on_axis is None:
        return AxisDecision((None,) * len(call.operands), (None,))
    placed = tuple(_aligned(operand, lead, on_axis) for operand in call.operands)
    return None if None in placed else AxisDecision(placed, (on_axis,), as_shard=True)


def elementwise_lists(call: OperatorCall) -> AxisDecision | None:
    """Decides `_foreach_*` and `_fused_*`: tensors are placed like the first list's."""
    leads = [operand for operand in call.operands if operand.argument == 0]
    inputs: list[AxisPlacement | None] = []
    for operand in call.operands:
        lead = leads[operand.item or 0]
        on_axis = interleaved_placement(lead.spec)
        if on_axis is None:
            inputs.append(None)
            continue
        placed = _aligned(operand, lead, on_axis)
        if placed is None:
            return None
        inputs.append(placed)
    outputs = tuple(interleaved_placement(lead.spec) for lead in leads)
    return AxisDecision(tuple(inputs), outputs, as_shard=True)


def reduced_lists(call: OperatorCall) -> AxisDecision | None:
    """Decides `_foreach_norm` and `_foreach_max`: of a maximum all ranks need rows."""
    if _norm_is_a_sum(call):
        return elementwise_lists(call)
    found = [(operand, interleaved_placement(operand.spec)) for operand in call.operands]
    if any(on_axis is not None and _may_be_empty(operand, on_axis) for operand, on_axis in found):
        return None
    return elementwise_lists(call)


def _norm_is_a_sum(call: OperatorCall) -> bool:
    """Whether it is a norm whose term of an empty shard is 0."""
    order = call.argument("ord", default=2)
    is_norm = call.op._schema.name == "aten::_foreach_norm"
    return is_norm and isinstance(order, int | float) and 0 < order < math.inf


def product(call: OperatorCall) -> AxisDecision | None:
    """Decides matrix products: rows, columns, or both contracted dims are interleaved."""
    *addends, left, right = call.operands
    on_left, on_right = interleaved_placement(left.spec), interleaved_placement(right.spec)
    contracted = left.spec.ndim - 1, right.spec.ndim - 2
    if on_left is not None and _dim(on_left) == contracted[0]:
        on_right = _with_dim(on_left, contracted[1])
    elif on_right is not None and _dim(on_right) == contracted[1]:
        on_left = _with_dim(on_right, contracted[0])
    elif left.spec.ndim == 3 and _batch_is_interleaved(on_left, on_right):
        on_left = on_right = on_left or on_right
    elif on_left is not None and on_right is not None:
        return None  # rows and columns on one axis
    lead = on_left or on_right
    if lead is None:
        return None
    replicated = AxisPlacement(lead.axis, Replicate())
    inputs = [_addend(operand, left, lead, replicated, contracted) for operand in addends]
    inputs += [on_left or replicated, on_right or replicated]
    return None if None in inputs else AxisDecision(tuple(inputs), (lead,), as_shard=True)


def _batch_is_interleaved(left: AxisPlacement | None, right: AxisPlacement | None) -> bool:
    """Whether the first dim is interleaved, and in the same way if both operands are."""
    found = [on_axis for on_axis in (left, right) if on_axis is not None]
    return all(on_axis == found[0] and _dim(on_axis) == 0 for on_axis in found) and bool(found)


def _addend(
    operand: TensorOperand,
    left: TensorOperand,
    lead: AxisPlacement,
    replicated: AxisPlacement,
    contracted: tuple[int, int],
) -> AxisPlacement | None:
    """Returns the placement of the addend of `addmm`: the result's, or replicated."""
    dim, ndim = _dim(lead), left.spec.ndim
    if dim == contracted[0] and lead == interleaved_placement(left.spec):
        return None  # the product is Partial, so the addend would have to be added on one rank only
    aligned = dim - ndim + operand.spec.ndim
    if aligned < 0 or operand.shape[aligned] == 1:
        return replicated
    return _with_dim(lead, aligned)


def _all_are_shards(call: OperatorCall) -> bool:
    return all(
        placement.equals_shard
        for spec in call.specs
        for placement in spec.placements
        if isinstance(placement, InterleavedShard)
    )


def _aligned(
    operand: TensorOperand, lead: TensorOperand, on_axis: AxisPlacement
) -> AxisPlacement | None:
    dim = _dim(on_axis)
    if tuple(operand.shape) == tuple(lead.shape):
        return on_axis
    if operand.spec.ndim > lead.spec.ndim:
        return None
    aligned = dim - lead.spec.ndim + operand.spec.ndim
    if aligned < 0 or operand.shape[aligned] == 1:
        return AxisPlacement(on_axis.axis, Replicate())
    return _with_dim(on_axis, aligned)


def _even(operand: TensorOperand, on_axis: AxisPlacement) -> bool:
    placement = on_axis.placement
    assert isinstance(placement, InterleavedShard)
    ranks = operand.spec.mesh.size(on_axis.axis)
    return placement.chunk(tensor_meta_of(operand.spec).shape) % (ranks * placement.unit) == 0


def _may_be_empty(operand: TensorOperand, on_axis: AxisPlacement) -> bool:
    placement, ranks = on_axis.placement, operand.spec.mesh.size(on_axis.axis)
    assert isinstance(placement, InterleavedShard)
    return not placement.piece(tensor_meta_of(operand.spec).shape, ranks, ranks - 1)


def _one_kind(found: list[AxisPlacement | None]) -> bool:
    kinds = {
        (f.placement.interleaves, f.placement.unit)
        for f in found
        if f and isinstance(f.placement, InterleavedShard)
    }
    return len(kinds) == 1


def _dim(on_axis: AxisPlacement) -> int:
    assert isinstance(on_axis.placement, InterleavedShard)
    return on_axis.placement.dim


def _with_dim(on_axis: AxisPlacement, dim: int) -> AxisPlacement:
    assert isinstance(on_axis.placement, InterleavedShard)
    return AxisPlacement(on_axis.axis, on_axis.placement.with_dim(dim))
