"""Operators on interleaved inputs: what is true of a Shard is true of it, where order is no matter.

An interleaved shard holds other rows than a Shard of the same dim, but as many (where its chunks
are cut evenly). An operator that treats the rows alike does to it what it does to a Shard, so stock
is asked about a Shard. Operators that care which rows they are (views, splits) have rules here.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate

from ragged_shard.interleaved import InterleavedShard
from ragged_shard.ops.interleaved_views import interleaved_of, join, split, view
from ragged_shard.question import Answer, OnAxis, Operand, Question, Rule
from ragged_shard.spec import meta_of

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
    }
)
_POINTWISE = frozenset({"copy_", "equal", "fill_", "masked_fill", "masked_fill_", "where", "zero_"})


#: Of those, the ones that need as many rows on every rank: local sizes, means, empty shards.
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


def rule_for(question: Question) -> Rule | None:
    """The rule of an operator for interleaved inputs, or None."""
    if question.op.namespace != "aten":
        return None
    name = question.op._schema.name.removeprefix("aten::")
    if name == "cat":
        return join
    if name in ("view", "_unsafe_view", "reshape"):
        return view
    if _all_of_one_chunk(question):
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
    if name in _POINTWISE or torch.Tag.pointwise in question.op.tags:
        return elementwise
    return None


def as_shard(question: Question) -> Answer:
    """Any operator where every interleaved input has one chunk, and so holds what a Shard does.

    Stock decides everything; its shards are called interleaved ones again, for `join`.
    """
    inputs = tuple(interleaved_of(operand.spec) for operand in question.operands)
    lead = next(on_axis for on_axis in inputs if on_axis is not None)
    return Answer(inputs, (lead,), as_shard=True)


def like(question: Question) -> Answer | None:
    """One or more inputs of which only the first is interleaved."""
    found = [interleaved_of(operand.spec) for operand in question.operands]
    if found[0] is None:
        return None
    uneven = not _even(question.operands[0], found[0])
    if uneven and question.op._schema.name.removeprefix("aten::") in _EVEN:
        return None
    if any(other is not None for other in found[1:]) and question.operands[0].item is None:
        return None
    axis = found[0].axis
    inputs = tuple(on_axis or OnAxis(axis, Replicate()) for on_axis in found)
    return Answer(inputs, (found[0],), as_shard=True) if _one_kind(found) else None


def elementwise(question: Question) -> Answer | None:
    """One tensor out: every operand cut as the interleaved one along the same dim."""
    lead = question.operands[0]
    if not question.in_place:
        candidates = [o for o in question.operands if interleaved_of(o.spec) is not None]
        lead = max(candidates, key=lambda operand: operand.spec.ndim)
    on_axis = interleaved_of(lead.spec)
    if on_axis is None:
        return Answer((None,) * len(question.operands), (None,))
    placed = tuple(_beside(operand, lead, on_axis) for operand in question.operands)
    return None if None in placed else Answer(placed, (on_axis,), as_shard=True)


def elementwise_lists(question: Question) -> Answer | None:
    """`_foreach_*` and `_fused_*`: index by index, after the first list."""
    leads = [operand for operand in question.operands if operand.argument == 0]
    inputs: list[OnAxis | None] = []
    for operand in question.operands:
        lead = leads[operand.item or 0]
        on_axis = interleaved_of(lead.spec)
        if on_axis is None:
            inputs.append(None)
            continue
        placed = _beside(operand, lead, on_axis)
        if placed is None:
            return None
        inputs.append(placed)
    outputs = tuple(interleaved_of(lead.spec) for lead in leads)
    return Answer(tuple(inputs), outputs, as_shard=True)


def reduced_lists(question: Question) -> Answer | None:
    """`_foreach_norm` and `_foreach_max`: index by index, where no rank has less than another."""
    found = [(operand, interleaved_of(operand.spec)) for operand in question.operands]
    if not all(on_axis is None or _even(operand, on_axis) for operand, on_axis in found):
        return None
    return elementwise_lists(question)


def product(question: Question) -> Answer | None:
    """Matrix products: rows or columns stay interleaved, a contraction needs both sides alike."""
    *addends, left, right = question.operands
    on_left, on_right = interleaved_of(left.spec), interleaved_of(right.spec)
    contracted = left.spec.ndim - 1, right.spec.ndim - 2
    if on_left is not None and _dim(on_left) == contracted[0]:
        on_right = _with_dim(on_left, contracted[1])
    elif on_right is not None and _dim(on_right) == contracted[1]:
        on_left = _with_dim(on_right, contracted[0])
    elif left.spec.ndim == 3 and _batch_is_cut(on_left, on_right):
        on_left = on_right = on_left or on_right
    elif on_left is not None and on_right is not None:
        return None  # rows and columns on one axis
    lead = on_left or on_right
    if lead is None:
        return None
    replicated = OnAxis(lead.axis, Replicate())
    inputs = [_addend(operand, left, lead, replicated, contracted) for operand in addends]
    inputs += [on_left or replicated, on_right or replicated]
    return None if None in inputs else Answer(tuple(inputs), (lead,), as_shard=True)


def _batch_is_cut(left: OnAxis | None, right: OnAxis | None) -> bool:
    """Whether the first dim is interleaved, in both operands alike if in both."""
    found = [on_axis for on_axis in (left, right) if on_axis is not None]
    return all(on_axis == found[0] and _dim(on_axis) == 0 for on_axis in found) and bool(found)


def _addend(
    operand: Operand, left: Operand, lead: OnAxis, replicated: OnAxis, contracted: tuple[int, int]
) -> OnAxis | None:
    """How the addend of `addmm` is placed: as the result, where a dim of it is interleaved."""
    dim, ndim = _dim(lead), left.spec.ndim
    if dim == contracted[0] and lead == interleaved_of(left.spec):
        return None  # stock would have to add it once only
    aligned = dim - ndim + operand.spec.ndim
    if aligned < 0 or operand.shape[aligned] == 1:
        return replicated
    return _with_dim(lead, aligned)


def _all_of_one_chunk(question: Question) -> bool:
    return all(
        placement.interleaves == 1
        for spec in question.specs
        for placement in spec.placements
        if isinstance(placement, InterleavedShard)
    )


def _beside(operand: Operand, lead: Operand, on_axis: OnAxis) -> OnAxis | None:
    dim = _dim(on_axis)
    if tuple(operand.shape) == tuple(lead.shape):
        return on_axis
    if operand.spec.ndim > lead.spec.ndim:
        return None
    aligned = dim - lead.spec.ndim + operand.spec.ndim
    if aligned < 0 or operand.shape[aligned] == 1:
        return OnAxis(on_axis.axis, Replicate())
    return _with_dim(on_axis, aligned)


def _even(operand: Operand, on_axis: OnAxis) -> bool:
    placement = on_axis.placement
    assert isinstance(placement, InterleavedShard)
    return placement.chunk(meta_of(operand.spec).shape) % operand.spec.mesh.size(on_axis.axis) == 0


def _one_kind(found: list[OnAxis | None]) -> bool:
    kinds = {
        f.placement.interleaves for f in found if f and isinstance(f.placement, InterleavedShard)
    }
    return len(kinds) == 1


def _dim(on_axis: OnAxis) -> int:
    assert isinstance(on_axis.placement, InterleavedShard)
    return on_axis.placement.dim


def _with_dim(on_axis: OnAxis, dim: int) -> OnAxis:
    assert isinstance(on_axis.placement, InterleavedShard)
    return OnAxis(on_axis.axis, InterleavedShard(dim, on_axis.placement.interleaves))
