"""Views that read a contiguous tensor with another shape: the same run of storage on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragged_shard.boxes import contiguous_strides
from ragged_shard.ops.conform import cut_dims, ragged_of
from ragged_shard.ops.sizes import local_size, resolved
from ragged_shard.question import Answer, OnAxis, Question
from ragged_shard.ragged import RaggedShard
from ragged_shard.spec import cut_a_dim, meta_of


def view(question: Question) -> Answer | None:
    """`view` and `reshape` of a contiguous tensor: units stay what they are, in other dims.

    The result names as few dims as its units allow, so rows that are still whole stay whole.
    """
    [spec] = question.specs
    on_axis = ragged_of(spec)
    assert on_axis is not None
    ragged = on_axis.placement
    assert isinstance(ragged, RaggedShard)
    meta = meta_of(spec)
    if tuple(meta.stride) != contiguous_strides(meta.shape):
        return None
    shape = resolved(question.argument("size"), meta.shape.numel())
    if cut_a_dim(spec.placements):
        return None  # stock may move what the other axes cut, and the units are of what is left
    dims = _dims(ragged, meta.shape, shape)
    result = OnAxis(on_axis.axis, ragged.with_units(dims, ragged.local_units))

    return Answer((on_axis,), (result,), {question.position("size"): local_size})


def unsqueeze(question: Question) -> Answer | None:
    """`unsqueeze` behind whole rows, as the backward of a sum over a dim has it."""
    [spec] = question.specs
    on_axis, dim = ragged_of(spec), question.argument("dim")
    assert on_axis is not None
    assert isinstance(dim, int)
    if cut_dims(on_axis.placement) > 1 or dim % (spec.ndim + 1) == 0:
        return None
    return Answer((on_axis,), (on_axis,))


def squeeze(question: Question) -> Answer | None:
    """`squeeze` of dims behind whole rows."""
    [spec] = question.specs
    on_axis, dims = ragged_of(spec), question.argument("dim")
    assert on_axis is not None
    if cut_dims(on_axis.placement) > 1 or spec.ndim == 0 or dims is None:
        return None
    dims = [dims] if isinstance(dims, int) else dims
    assert isinstance(dims, list | tuple)
    if any(dim % spec.ndim == 0 for dim in dims):
        return None
    return Answer((on_axis,), (on_axis,))


def expand(question: Question) -> Answer | None:
    """`expand` of dims behind whole rows; the rows are as many as before."""
    [spec] = question.specs
    on_axis, size = ragged_of(spec), question.argument("size")
    assert on_axis is not None
    assert isinstance(size, list | tuple)
    rows = meta_of(spec).shape[:1]
    if cut_dims(on_axis.placement) > 1 or len(size) != spec.ndim or size[0] not in (-1, *rows):
        return None
    if cut_a_dim(spec.placements):
        return None
    return Answer((on_axis,), (on_axis,), {question.position("size"): local_size})


def _dims(ragged: RaggedShard, old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """The fewest leading dims of the new shape that the units cut evenly."""
    if not ragged.dims:
        return ()
    unit = ragged.unit_size(old)
    for count in range(1, len(new)):
        row = math.prod(new[count:])
        if row == 0 or unit % row == 0:
            return tuple(range(count))
    return tuple(range(len(new)))
