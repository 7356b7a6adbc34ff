"""Operators that copy a tensor or make another of its kind."""

from __future__ import annotations

from torch.distributed.tensor import Replicate

from ragged_shard.boxes import contiguous_strides
from ragged_shard.ops.conform import ragged_of
from ragged_shard.question import Answer, OnAxis, Question
from ragged_shard.spec import cut_a_dim, local_shape, meta_of


def like(question: Question) -> Answer | None:
    """`clone`, `detach`, `zeros_like` and their kind: placed as the only tensor there is."""
    [spec] = question.specs
    on_axis = ragged_of(spec)
    return Answer((on_axis,), (on_axis,))


def new(question: Question) -> Answer | None:
    """`new_zeros` and its kind: ragged where the size is the tensor's own, else replicated.

    The tensor is looked at for its dtype and device only, so it stays where it is.
    """
    [spec] = question.specs
    on_axis = ragged_of(spec)
    assert on_axis is not None
    size = question.argument("size")
    assert isinstance(size, list | tuple)
    if tuple(size) != tuple(meta_of(spec).shape) or cut_a_dim(spec.placements):
        return Answer((on_axis,), (OnAxis(on_axis.axis, Replicate()),))
    local = local_shape(size, spec.mesh, spec.placements)
    arguments: dict[int, object] = {question.position("size"): local}
    if question.argument("stride") is not None:  # new_empty_strided, for a gradient's first copy
        arguments[question.position("stride")] = contiguous_strides(local)
    return Answer((on_axis,), (on_axis,), arguments)
