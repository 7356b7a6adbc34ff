"""Rules of `view`, `split` and `cat` of interleaved inputs."""

from __future__ import annotations

import math

from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_shard.dispatch.operator_call import AxisDecision, AxisPlacement, OperatorCall
from ragged_shard.dispatch.rules.views import local_size, resolved
from ragged_shard.geometry.specs import dim_of, tensor_meta_of
from ragged_shard.interleaved import InterleavedShard


def split(call: OperatorCall) -> AxisDecision | None:
    """Decides `split` and `split_with_sizes` between the chunks of the interleaved dim.

    A part of one chunk has the local tensors of a Shard, but is placed as
    ``InterleavedShard(dim, 1)``, so that `cat` recognizes the gradients of the parts.
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
    axis_size, rank = spec.mesh.size(on_axis.axis), spec.mesh.get_local_rank(on_axis.axis)
    chunk_length = len(placement.piece(shape, axis_size, rank))
    local_sizes = [size // chunk * chunk_length for size in sizes]
    outputs = tuple(
        AxisPlacement(on_axis.axis, placement.with_dim(placement.dim, size // chunk))
        for size in sizes
    )
    is_list = isinstance(call.args[1], list | tuple)
    value: object = local_sizes if is_list else local_sizes[0]
    return AxisDecision((on_axis,), outputs, {1: value})


def cat(call: OperatorCall) -> AxisDecision | None:
    """Decides `cat`, which in backward reverses a `split` along the interleaved dim.

    Tensors with chunks of one size become one tensor with all of their chunks. Along another dim
    all tensors must have the same placement, which the result has too.
    """
    tensors, dim = call.operands, call.argument("dim", default=0)
    lead = next(on for spec in call.specs if (on := interleaved_placement(spec)) is not None)
    assert isinstance(lead.placement, InterleavedShard)
    assert isinstance(dim, int)
    found = [_as_interleaved(operand.spec.placements[lead.axis]) for operand in tensors]
    placements = [placement for placement in found if placement is not None]
    if None in found or any(placement.dim != lead.placement.dim for placement in placements):
        return None
    inputs = tuple(AxisPlacement(lead.axis, placement) for placement in placements)
    if dim % tensors[0].spec.ndim != lead.placement.dim:
        all_equal = all(placement == lead.placement for placement in placements)
        return AxisDecision(inputs, (lead,), as_shard=True) if all_equal else None
    chunk_sizes = {
        placement.chunk(tensor.shape) for placement, tensor in zip(placements, tensors, strict=True)
    }
    if len(chunk_sizes) != 1 or len({placement.unit for placement in placements}) != 1:
        return None
    interleaves = sum(placement.interleaves for placement in placements)
    result = lead.placement.with_dim(lead.placement.dim, interleaves)
    return AxisDecision(inputs, (AxisPlacement(lead.axis, result),))


def view(call: OperatorCall) -> AxisDecision | None:
    """Decides `view`.

    Other dims may change, dims before the interleaved one may be flattened into it, and it may be
    split into its chunks: ``(3 * h) -> (3, h)`` shards ``h`` in one chunk,
    ``(3 * h) -> (3, heads, size)`` the heads. If earlier axes shard the first dim (the batch)
    evenly, before and after, the rule is applied to the local shapes of these axes. If axes shard
    any dims before the interleaved one (sequences), none of these may be flattened into it.
    """
    [spec] = call.specs
    on_axis = interleaved_placement(spec)
    assert on_axis is not None
    placement = on_axis.placement
    assert isinstance(placement, InterleavedShard)
    shape = tuple(tensor_meta_of(spec).shape)
    size = resolved(call.argument("size"), math.prod(shape))
    shards = _shards_of_batch(spec, on_axis.axis)
    apart = shards is None
    if apart and not _shard_dims_before(spec, on_axis):
        return None
    if shards is not None and shards > 1:
        if not size or shape[0] % shards or size[0] % shards:
            return None
        shape, size = (shape[0] // shards, *shape[1:]), (size[0] // shards, *size[1:])
    target = _viewed(placement, shape, size, spec.mesh.size(on_axis.axis), apart=apart)
    if target is None:
        one_chunk = AxisDecision((on_axis,), (on_axis,), as_shard=True)
        return one_chunk if placement.equals_shard else None

    return AxisDecision(
        (on_axis,), (AxisPlacement(on_axis.axis, target),), {call.position("size"): local_size}
    )


def _shards_of_batch(spec: DTensorSpec, axis: int) -> int | None:
    """Returns the shards of dim 0 on earlier axes; None if other axes or dims are sharded."""
    shards = 1
    for other, placement in enumerate(spec.placements):
        if other == axis or dim_of(placement) is None:
            continue
        if type(placement) is not Shard or placement.dim != 0 or other > axis:
            return None
        shards *= spec.mesh.size(other)
    return shards


def _shard_dims_before(spec: DTensorSpec, on_axis: AxisPlacement) -> bool:
    """Whether all other axes that shard anything shard dims before the interleaved one."""
    dim = dim_of(on_axis.placement)
    return dim is not None and all(
        isinstance(placement, Shard | _StridedShard) and placement.dim < dim
        for axis, placement in enumerate(spec.placements)
        if axis != on_axis.axis and dim_of(placement) is not None
    )


def _viewed(
    placement: InterleavedShard,
    old: tuple[int, ...],
    new: tuple[int, ...],
    axis_size: int,
    *,
    apart: bool,
) -> InterleavedShard | None:
    """Returns the placement of the view; None if the view of a local tensor is no shard of it.

    Args:
        placement: of the tensor.
        old: its shape.
        new: that of the view.
        axis_size: the ranks along the axis.
        apart: whether dims before the interleaved one may not be flattened into it.
    """
    dim, count = placement.dim, placement.interleaves
    before, after = math.prod(old[:dim]), math.prod(old[dim + 1 :])
    length, chunk = old[dim], placement.chunk(old)
    for new_dim in range(len(new)):
        new_before, new_after = math.prod(new[:new_dim]), math.prod(new[new_dim + 1 :])
        is_kept = new_after == after and new[new_dim] * new_before == before * length
        if is_kept and new_before and before % new_before == 0:  # or flattened with dims before it
            if apart and before != new_before:
                return None
            return placement.with_dim(new_dim, count * (before // new_before))
        is_last = new_dim + 1 == len(new)
        if new_before != before or not new[new_dim] or count % new[new_dim] or is_last:
            continue
        inner, inner_count = new[new_dim + 1], count // new[new_dim]
        if inner * new[new_dim] == length:
            return placement.with_dim(new_dim + 1, inner_count)
        splits_chunk = inner_count == 1 and inner > 0 and chunk % inner == 0  # into heads
        is_even = chunk % axis_size == 0 and inner % axis_size == 0
        if splits_chunk and is_even and placement.unit == 1:
            return InterleavedShard(new_dim + 1, 1)
    return None


def interleaved_placement(spec: DTensorSpec) -> AxisPlacement | None:
    """Returns the first interleaved placement of a spec, with its axis; None if it has none."""
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, InterleavedShard):
            return AxisPlacement(axis, placement)
    return None


def _as_interleaved(placement: Placement) -> InterleavedShard | None:
    """Returns an InterleavedShard, or a Shard as one of a single chunk; None for others."""
    if isinstance(placement, Shard):
        return InterleavedShard(placement.dim, 1)
    return placement if isinstance(placement, InterleavedShard) else None


def _sizes(call: OperatorCall, length: int) -> list[int]:
    sizes = call.args[1]
    if isinstance(sizes, int):
        return [min(sizes, length - start) for start in range(0, length, sizes)]
    assert isinstance(sizes, list | tuple)
    return list(sizes)
