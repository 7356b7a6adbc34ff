"""Rules of views and copies of a ragged tensor: each rank has the same storage in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ragged_shard.dispatch.operator_call import AxisDecision, AxisPlacement, OperatorCall
from ragged_shard.dispatch.rules.elementwise import flattened_dims, ragged_placement
from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.geometry.specs import local_shape, shards_any_dim, tensor_meta_of
from ragged_shard.ragged import RaggedShard


def resolved(size: object, numel: int) -> tuple[int, ...]:
    """Returns a view's size with -1 replaced, for a tensor of `numel` elements."""
    assert isinstance(size, list | tuple)
    known = math.prod(length for length in size if length != -1)
    return tuple(numel // known if length == -1 else length for length in size)


def local_size(output: DTensorSpec) -> Sequence[int]:
    """Returns the local size of an output on this rank, which replaces the global size."""
    return local_shape(tensor_meta_of(output).shape, output.mesh, output.placements)


def view(call: OperatorCall) -> AxisDecision | None:
    """Decides `view` and `reshape` of a contiguous tensor: the same units, in other dims.

    The result has the fewest dims that its units allow, so rows that are not split stay so.
    """
    [spec] = call.specs
    on_axis = ragged_placement(spec)
    assert on_axis is not None
    ragged = on_axis.placement
    assert isinstance(ragged, RaggedShard)
    meta = tensor_meta_of(spec)
    if tuple(meta.stride) != contiguous_strides(meta.shape):
        return None
    shape = resolved(call.argument("size"), meta.shape.numel())
    if shards_any_dim(spec.placements) or ragged.bases_differ:
        return None  # torch may reshard the other axes, which changes the base of the units
    dims = _dims(ragged, meta.shape, shape)
    result = AxisPlacement(on_axis.axis, ragged.with_units(dims, ragged.local_units))

    return AxisDecision((on_axis,), (result,), {call.position("size"): local_size})


def unsqueeze(call: OperatorCall) -> AxisDecision | None:
    """Decides `unsqueeze` after the first dim, as in the backward of a sum over a dim."""
    [spec] = call.specs
    on_axis, dim = ragged_placement(spec), call.argument("dim")
    assert on_axis is not None
    assert isinstance(dim, int)
    if flattened_dims(on_axis.placement) > 1 or dim % (spec.ndim + 1) == 0:
        return None
    return AxisDecision((on_axis,), (on_axis,))


def squeeze(call: OperatorCall) -> AxisDecision | None:
    """Decides `squeeze` of dims after the first."""
    [spec] = call.specs
    on_axis, dims = ragged_placement(spec), call.argument("dim")
    assert on_axis is not None
    if flattened_dims(on_axis.placement) > 1 or spec.ndim == 0 or dims is None:
        return None
    dims = [dims] if isinstance(dims, int) else dims
    assert isinstance(dims, list | tuple)
    if any(dim % spec.ndim == 0 for dim in dims):
        return None
    return AxisDecision((on_axis,), (on_axis,))


def expand(call: OperatorCall) -> AxisDecision | None:
    """Decides `expand` of dims after the first, whose size does not change."""
    [spec] = call.specs
    on_axis, size = ragged_placement(spec), call.argument("size")
    assert on_axis is not None
    assert isinstance(size, list | tuple)
    rows = tensor_meta_of(spec).shape[:1]
    if (
        flattened_dims(on_axis.placement) > 1
        or len(size) != spec.ndim
        or size[0] not in (-1, *rows)
    ):
        return None
    if shards_any_dim(spec.placements):
        return None
    return AxisDecision((on_axis,), (on_axis,), {call.position("size"): local_size})


def _dims(ragged: RaggedShard, old: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Returns the fewest leading dims of the new shape that the units divide evenly."""
    if not ragged.dims:
        return ()
    unit = ragged.unit_size(old)
    for count in range(1, len(new)):
        row = math.prod(new[count:])
        if row == 0 or unit % row == 0:
            return tuple(range(count))
    return tuple(range(len(new)))


def like(call: OperatorCall) -> AxisDecision | None:
    """Decides `clone`, `detach`, `zeros_like` and the like: placed as their only tensor."""
    [spec] = call.specs
    on_axis = ragged_placement(spec)
    return AxisDecision((on_axis,), (on_axis,))


def new(call: OperatorCall) -> AxisDecision | None:
    """Decides `new_zeros` and the like: ragged if the size is the tensor's, else replicated.

    Only the tensor's dtype and device are used, so it is not redistributed.
    """
    [spec] = call.specs
    on_axis = ragged_placement(spec)
    assert on_axis is not None
    size = call.argument("size")
    assert isinstance(size, list | tuple)
    if tuple(size) != tuple(tensor_meta_of(spec).shape) or shards_any_dim(spec.placements):
        return AxisDecision((on_axis,), (AxisPlacement(on_axis.axis, Replicate()),))
    local = local_shape(size, spec.mesh, spec.placements)
    arguments: dict[int, object] = {call.position("size"): local}
    if call.argument("stride") is not None:  # new_empty_strided, for a gradient's first copy
        arguments[call.position("stride")] = contiguous_strides(local)
    return AxisDecision((on_axis,), (on_axis,), arguments)
