"""Rules of reductions: Partial over the sharded dims, ragged over the other dims."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.dispatch.operator_call import (
    AxisDecision,
    AxisPlacement,
    OperatorCall,
    TensorOperand,
)
from ragged_shard.dispatch.rules.elementwise import flattened_dims, ragged_placement
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution.reduction_input import ReductionInput


def reduction(kind: str) -> Callable[[OperatorCall], AxisDecision | None]:
    """Returns the rule of a reduction.

    Args:
        kind: ``sum``, ``mean``, ``max``, ``min``, ``product`` or ``norm``.
    """

    def rule(call: OperatorCall) -> AxisDecision | None:
        return _reduce(call, _kind(call, kind))

    return rule


def foreach_reduction(kind: str) -> Callable[[OperatorCall], AxisDecision | None]:
    """Returns the rule of a reduction of every tensor of a list to a scalar."""

    def rule(call: OperatorCall) -> AxisDecision | None:
        actual = _kind(call, kind)
        decided = [_full_reduction(operand, actual) for operand in call.operands]
        inputs = tuple(placements.input for placements in decided)
        return AxisDecision(inputs, tuple(placements.output for placements in decided))

    return rule


def along_unsharded_dim(call: OperatorCall) -> AxisDecision | None:
    """Decides `max.dim`, `softmax` and the like, over a dim that is not sharded."""
    [operand] = call.operands
    on_axis = ragged_placement(operand.spec)
    assert on_axis is not None
    dim = call.argument("dim")
    if not isinstance(dim, int) or flattened_dims(on_axis.placement) > 1 or operand.spec.ndim == 0:
        return None
    return None if dim % operand.spec.ndim == 0 else AxisDecision((on_axis,), (on_axis,))


def _reduce(call: OperatorCall, kind: str) -> AxisDecision | None:
    [operand] = call.operands
    on_axis = ragged_placement(operand.spec)
    assert on_axis is not None
    ndim, flattened = operand.spec.ndim, flattened_dims(on_axis.placement)
    dims = _dims(call, ndim)
    sharded = set(range(min(flattened, ndim)))
    if sharded <= dims:
        if flattened > 1 and call.argument("keepdim", default=False):
            return None  # the local tensor has one dim for several, which would have to be kept
        placements = _full_reduction(operand, kind)
    elif sharded & dims:
        return None
    else:
        placements = _ReductionPlacements(on_axis, on_axis)
    inputs, outputs = (placements.input,), (placements.output,)
    dim_argument = call.argument("dim")
    if flattened == 1 or dim_argument is None or dim_argument == []:
        return AxisDecision(inputs, outputs)
    local_dims = sorted({max(dim - flattened + 1, 0) for dim in dims})
    value: object = local_dims[0] if isinstance(dim_argument, int) else local_dims
    return AxisDecision(inputs, outputs, {call.position("dim"): value})


@dataclass(frozen=True)
class _ReductionPlacements:
    """The placements of a reduction's input and output; None where torch decides."""

    input: AxisPlacement | None
    output: AxisPlacement | None


def _full_reduction(operand: TensorOperand, kind: str) -> _ReductionPlacements:
    """Decides a reduction over all sharded dims."""
    on_axis = ragged_placement(operand.spec)
    if on_axis is None:
        return _ReductionPlacements(None, None)
    ragged = on_axis.placement
    assert isinstance(ragged, RaggedShard)
    reduced: Placement = ragged
    may_be_empty = 0 in ragged.local_units or ragged.bases_differ
    if kind == "mean":
        reduced = ReductionInput(ragged, 0.0, weighted=True)
    elif may_be_empty and (value := _neutral(kind)) is not None:
        reduced = ReductionInput(ragged, value)
    return _ReductionPlacements(
        AxisPlacement(on_axis.axis, reduced), AxisPlacement(on_axis.axis, _partial(kind))
    )


def _neutral(kind: str) -> float | None:
    """Returns the value of an empty shard, which torch refuses to reduce; None if it does not."""
    match kind.split():
        case ["max"]:
            return -math.inf
        case ["min"]:
            return math.inf
        case ["norm", "inf"]:
            return 0.0
        case ["norm", order] if float(order) < 0:
            return math.inf
    return None


def _partial(kind: str) -> Partial:
    match kind.split():
        case ["norm", "inf"]:
            return Partial("max")
        case ["norm", "-inf"]:
            return Partial("min")
        case ["norm", "0.0"]:
            return Partial("sum")
        case ["norm", order]:
            return _NormPartial(float(order))
        case ["mean"]:
            return Partial("sum")
    return Partial(kind)


def _kind(call: OperatorCall, kind: str) -> str:
    if kind != "norm":
        return kind
    for name in ("ord", "p"):
        order = call.argument(name)
        if isinstance(order, int | float | str):
            return f"norm {float(order)}"
    return "norm 2.0"


def _dims(call: OperatorCall, ndim: int) -> set[int]:
    dims = call.argument("dim")
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return set(range(ndim))
    return {dim % ndim for dim in dims if isinstance(dim, int)} if ndim else set()
