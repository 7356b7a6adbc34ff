"""Views and splits of interleaved inputs: chunks that fall apart, or that other dims join."""

from __future__ import annotations

import math

from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.dispatch.operator_call import AxisDecision, AxisPlacement, OperatorCall
from ragged_shard.dispatch.rules.views import local_size, resolved
from ragged_shard.geometry.specs import dim_of, tensor_meta_of
from ragged_shard.interleaved import InterleavedShard


def split(call: OperatorCall) -> AxisDecision | None:
    """`split` and `split_with_sizes`: along the interleaved dim between its chunks.

    A part of one chunk is what a Shard holds; it is said as ``InterleavedShard(dim, 1)``, so that
    the gradients of the parts are known for what they are where they are put together (`join`).
    """
    [spec] = call.specs
    on_axis = interleaved_placement(spec)
    assert on_axis is not None
    placement = on_axis.placement
    assert isinstance(placement, InterleavedShard)
    shape = tensor_meta_of(spec).shape
    dim = call.argument("dim", default=0)
    assert isinstance(dim, int)
    if dim % len(shape) != placement.dim:
        return AxisDecision((on_axis,), (on_axis,), as_shard=True)
    chunk, length = placement.chunk(shape), shape[placement.dim]
    sizes = _sizes(call, length)
    if chunk == 0 or any(size % chunk or size == 0 for size in sizes):
        return None
    size, rank = spec.mesh.size(on_axis.axis), spec.mesh.get_local_rank(on_axis.axis)
    mine = len(placement.piece(shape, size, rank))
    local = [size // chunk * mine for size in sizes]
    outputs = tuple(
        AxisPlacement(on_axis.axis, InterleavedShard(placement.dim, size // chunk))
        for size in sizes
    )
    given = call.args[1]
    value: object = local if isinstance(given, list | tuple) else local[0]
    return AxisDecision((on_axis,), outputs, {1: value})


def join(call: OperatorCall) -> AxisDecision | None:
    """`cat` along the interleaved dim, as the backward of a split has it: the reverse of `split`.

    Parts of equal chunks are one tensor of all their chunks. Along another dim, tensors placed
    alike stay so.
    """
    tensors, dim = call.operands, call.argument("dim", default=0)
    lead = next(on for spec in call.specs if (on := interleaved_placement(spec)) is not None)
    assert isinstance(lead.placement, InterleavedShard)
    assert isinstance(dim, int)
    parts = [_on(operand.spec.placements[lead.axis]) for operand in tensors]
    if any(part is None or part.dim != lead.placement.dim for part in parts):
        return None
    found = [part for part in parts if part is not None]
    inputs = tuple(AxisPlacement(lead.axis, part) for part in found)
    if dim % tensors[0].spec.ndim != lead.placement.dim:
        alike = all(part == lead.placement for part in found)
        return AxisDecision(inputs, (lead,), as_shard=True) if alike else None
    chunks = {part.chunk(t.shape) for part, t in zip(found, tensors, strict=True)}
    if len(chunks) != 1:
        return None
    joined = InterleavedShard(lead.placement.dim, sum(part.interleaves for part in found))
    return AxisDecision(inputs, (AxisPlacement(lead.axis, joined),))


def view(call: OperatorCall) -> AxisDecision | None:
    """`view`: other dims may change, dims before may join the interleaved one, chunks fall apart.

    ``(3 * h) -> (3, h)`` shards ``h`` in one chunk, ``(3 * h) -> (3, heads, size)`` the heads.
    Where earlier axes cut the first dim (the batch) evenly, before and after, all is said of what
    they leave.
    """
    [spec] = call.specs
    on_axis = interleaved_placement(spec)
    assert on_axis is not None
    placement = on_axis.placement
    assert isinstance(placement, InterleavedShard)
    shape = tuple(tensor_meta_of(spec).shape)
    size = resolved(call.argument("size"), math.prod(shape))
    pieces = _pieces_of_batch(spec, on_axis.axis)
    if pieces is None:
        return None
    if pieces > 1:
        if not size or shape[0] % pieces or size[0] % pieces:
            return None
        shape, size = (shape[0] // pieces, *shape[1:]), (size[0] // pieces, *size[1:])
    target = _after(placement, shape, size, spec.mesh.size(on_axis.axis))
    if target is None:
        one_chunk = AxisDecision((on_axis,), (on_axis,), as_shard=True)
        return one_chunk if placement.interleaves == 1 else None

    return AxisDecision(
        (on_axis,), (AxisPlacement(on_axis.axis, target),), {call.position("size"): local_size}
    )


def _pieces_of_batch(spec: DTensorSpec, axis: int) -> int | None:
    """Into how many pieces axes before this one cut the first dim; None where others cut more."""
    pieces = 1
    for other, placement in enumerate(spec.placements):
        if other == axis or dim_of(placement) is None:
            continue
        if type(placement) is not Shard or placement.dim != 0 or other > axis:
            return None
        pieces *= spec.mesh.size(other)
    return pieces


def _after(
    placement: InterleavedShard, old: tuple[int, ...], new: tuple[int, ...], axis_size: int
) -> InterleavedShard | None:
    """The placement of the viewed tensor, or None where a rank's part is no such view."""
    dim, count = placement.dim, placement.interleaves
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])
    length, chunk = old[dim], placement.chunk(old)
    for place in range(len(new)):
        ahead, behind = math.prod(new[:place]), math.prod(new[place + 1 :])
        whole = behind == after and new[place] * ahead == before * length
        if whole and ahead and before % ahead == 0:  # alone, or with dims before it
            return InterleavedShard(place, count * (before // ahead))
        if ahead != before or not new[place] or count % new[place] or place + 1 == len(new):
            continue
        inner, left = new[place + 1], count // new[place]
        if inner * new[place] == length:
            return InterleavedShard(place + 1, left)
        heads = left == 1 and inner > 0 and chunk % inner == 0  # a chunk falls apart itself
        if heads and chunk % axis_size == 0 and inner % axis_size == 0:
            return InterleavedShard(place + 1, 1)
    return None


def interleaved_placement(spec: DTensorSpec) -> AxisPlacement | None:
    """The first interleaved placement of a spec, with its axis."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, InterleavedShard):
            return AxisPlacement(axis, placement)
    return None


def _on(placement: Placement) -> InterleavedShard | None:
    """A placement as an interleaved one, a Shard being one of a single chunk."""
    if isinstance(placement, Shard):
        return InterleavedShard(placement.dim, 1)
    return placement if isinstance(placement, InterleavedShard) else None


def _sizes(call: OperatorCall, length: int) -> list[int]:
    given = call.args[1]
    if isinstance(given, int):
        return [min(given, length - start) for start in range(0, length, given)]
    assert isinstance(given, list | tuple)
    return list(given)
