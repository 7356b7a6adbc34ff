"""Reductions: over what is cut they leave a Partial, over whole dims a ragged result."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    """The rule of a reduction.

    Args:
        kind: ``sum``, ``mean``, ``max``, ``min``, ``product`` or ``norm``.
    """

    def rule(call: OperatorCall) -> AxisDecision | None:
        return _reduce(call, _kind(call, kind))

    return rule


def foreach_reduction(kind: str) -> Callable[[OperatorCall], AxisDecision | None]:
    """The rule of a reduction of every tensor of a list to a scalar."""

    def rule(call: OperatorCall) -> AxisDecision | None:
        actual = _kind(call, kind)
        pairs = [_whole(operand, actual) for operand in call.operands]
        return AxisDecision(tuple(i for i, _ in pairs), tuple(o for _, o in pairs))

    return rule


def along_whole_dims(call: OperatorCall) -> AxisDecision | None:
    """`max.dim`, `softmax` and their kind: right where the dim is whole, of no use elsewhere."""
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
    ndim, cut = operand.spec.ndim, flattened_dims(on_axis.placement)
    dims = _dims(call, ndim)
    leading = set(range(min(cut, ndim)))
    if leading <= dims:
        if cut > 1 and call.argument("keepdim", default=False):
            return None  # one local dim stands for several, which would have to be kept
        given, result = _whole(operand, kind)
        outputs = (result,)
    elif leading & dims:
        return None
    else:
        given, outputs = on_axis, (on_axis,)
    asked = call.argument("dim")
    if cut == 1 or asked is None or asked == []:
        return AxisDecision((given,), outputs)
    local = sorted({max(dim - cut + 1, 0) for dim in dims})
    value: object = local[0] if isinstance(asked, int) else local
    return AxisDecision((given,), outputs, {call.position("dim"): value})


def _whole(operand: TensorOperand, kind: str) -> tuple[AxisPlacement | None, AxisPlacement | None]:
    """What goes in and what comes out where everything that is cut is reduced."""
    on_axis = ragged_placement(operand.spec)
    if on_axis is None:
        return None, None
    ragged = on_axis.placement
    assert isinstance(ragged, RaggedShard)
    given: Placement = ragged
    if kind == "mean":
        given = ReductionInput(ragged, 0.0, weighted=True)
    elif 0 in ragged.local_units and (value := _neutral(kind)) is not None:
        given = ReductionInput(ragged, value)
    return AxisPlacement(on_axis.axis, given), AxisPlacement(on_axis.axis, _partial(kind))


def _neutral(kind: str) -> float | None:
    """What an empty shard gives where torch refuses to reduce nothing, else None."""
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
