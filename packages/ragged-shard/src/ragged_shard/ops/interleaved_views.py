"""Views and splits of interleaved inputs: chunks that fall apart, or that other dims join."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.interleaved import InterleavedShard
from ragged_shard.question import Answer, OnAxis, Question
from ragged_shard.spec import local_shape, meta_of


def split(question: Question) -> Answer | None:
    """`split` and `split_with_sizes`: along the interleaved dim at the seams of its chunks.

    A part of several chunks is interleaved, a part of one is a Shard.
    """
    found = _only(question)
    if found is None:
        return None
    on_axis, placement = found
    [spec] = question.specs
    shape = meta_of(spec).shape
    dim = question.argument("dim", default=0)
    assert isinstance(dim, int)
    if dim % len(shape) != placement.dim:
        return Answer((on_axis,), (on_axis,), as_shard=True)
    chunk, length = placement.chunk(shape), shape[placement.dim]
    sizes = _sizes(question, length)
    if chunk == 0 or any(size % chunk or size == 0 for size in sizes):
        return None
    mine = len(placement.piece(shape, spec.mesh.size(on_axis.axis), _rank(spec, on_axis)))
    local = [size // chunk * mine for size in sizes]
    outputs = tuple(
        OnAxis(on_axis.axis, _of_chunks(placement.dim, size // chunk)) for size in sizes
    )
    given = question.args[1]
    value: object = local if isinstance(given, list | tuple) else local[0]
    return Answer((on_axis,), outputs, {1: value})


def view(question: Question) -> Answer | None:
    """`view`: dims before and after the interleaved one may change, and its chunks may fall apart.

    ``(3 * h) -> (3, h)`` makes a Shard of ``h``, ``(3 * h) -> (3, heads, size)`` one of the heads.
    """
    found = _only(question)
    if found is None:
        return None
    on_axis, placement = found
    [spec] = question.specs
    shape = tuple(meta_of(spec).shape)
    size, axis_size = (
        _resolved(question.argument("size"), math.prod(shape)),
        spec.mesh.size(on_axis.axis),
    )
    if any(hasattr(p, "dim") for a, p in enumerate(spec.placements) if a != on_axis.axis):
        return None
    target = _after(placement, shape, size, axis_size)
    if target is None:
        return None

    def local_size(output: DTensorSpec) -> Sequence[int]:
        return local_shape(meta_of(output).shape, output.mesh, output.placements)

    return Answer(
        (on_axis,), (OnAxis(on_axis.axis, target),), {question.position("size"): local_size}
    )


def _after(
    placement: InterleavedShard, old: tuple[int, ...], new: tuple[int, ...], axis_size: int
) -> Placement | None:
    """The placement of the viewed tensor, or None where a rank's part is no such view."""
    before = math.prod(old[: placement.dim])
    after = math.prod(old[placement.dim + 1 :])
    length, chunk = old[placement.dim], placement.chunk(old)
    for dim in range(len(new) + 1):
        if math.prod(new[:dim]) != before:
            continue
        if dim < len(new) and new[dim] == length and math.prod(new[dim + 1 :]) == after:
            return InterleavedShard(dim, placement.interleaves)
        if dim + 1 < len(new) and new[dim] == placement.interleaves:
            heads = new[dim + 1]
            whole = heads > 0 and chunk % heads == 0
            if whole and chunk % axis_size == 0 and heads % axis_size == 0:
                return Shard(dim + 1)
    return None


def _only(question: Question) -> tuple[OnAxis, InterleavedShard] | None:
    if len(question.specs) != 1:
        return None
    [spec] = question.specs
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, InterleavedShard):
            return OnAxis(axis, placement), placement
    return None


def _sizes(question: Question, length: int) -> list[int]:
    given = question.args[1]
    if isinstance(given, int):
        return [min(given, length - start) for start in range(0, length, given)]
    assert isinstance(given, list | tuple)
    return list(given)


def _of_chunks(dim: int, count: int) -> Placement:
    return Shard(dim) if count == 1 else InterleavedShard(dim, count)


def _rank(spec: DTensorSpec, on_axis: OnAxis) -> int:
    return spec.mesh.get_local_rank(on_axis.axis)


def _resolved(size: object, numel: int) -> tuple[int, ...]:
    assert isinstance(size, list | tuple)
    known = math.prod(length for length in size if length != -1)
    return tuple(numel // known if length == -1 else length for length in size)
