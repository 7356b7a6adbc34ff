"""Reductions: over what is cut they leave a Partial, over whole dims a ragged result."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.distributed.tensor import Partial
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.filled import Filled
from ragged_shard.ops.conform import cut_dims, ragged_of
from ragged_shard.question import Answer, OnAxis, Operand, Question
from ragged_shard.ragged import RaggedShard


def reduction(kind: str) -> Callable[[Question], Answer | None]:
    """The rule of a reduction.

    Args:
        kind: ``sum``, ``mean``, ``max``, ``min``, ``product`` or ``norm``.
    """

    def rule(question: Question) -> Answer | None:
        return _reduce(question, _kind(question, kind))

    return rule


def foreach_reduction(kind: str) -> Callable[[Question], Answer | None]:
    """The rule of a reduction of every tensor of a list to a scalar."""

    def rule(question: Question) -> Answer | None:
        actual = _kind(question, kind)
        pairs = [_whole(operand, actual) for operand in question.operands]
        return Answer(tuple(i for i, _ in pairs), tuple(o for _, o in pairs))

    return rule


def along_whole_dims(question: Question) -> Answer | None:
    """`max.dim`, `softmax` and their kind: right where the dim is whole, of no use elsewhere."""
    [operand] = question.operands
    on_axis = ragged_of(operand.spec)
    assert on_axis is not None
    dim = question.argument("dim")
    if not isinstance(dim, int) or cut_dims(on_axis.placement) > 1 or operand.spec.ndim == 0:
        return None
    return None if dim % operand.spec.ndim == 0 else Answer((on_axis,), (on_axis,))


def _reduce(question: Question, kind: str) -> Answer | None:
    [operand] = question.operands
    on_axis = ragged_of(operand.spec)
    assert on_axis is not None
    ndim, cut = operand.spec.ndim, cut_dims(on_axis.placement)
    dims = _dims(question, ndim)
    leading = set(range(min(cut, ndim)))
    if leading <= dims:
        if cut > 1 and question.argument("keepdim", default=False):
            return None  # one local dim stands for several, which would have to be kept
        given, result = _whole(operand, kind)
        outputs = (result,)
    elif leading & dims:
        return None
    else:
        given, outputs = on_axis, (on_axis,)
    asked = question.argument("dim")
    if cut == 1 or asked is None or asked == []:
        return Answer((given,), outputs)
    local = sorted({max(dim - cut + 1, 0) for dim in dims})
    value: object = local[0] if isinstance(asked, int) else local
    return Answer((given,), outputs, {question.position("dim"): value})


def _whole(operand: Operand, kind: str) -> tuple[OnAxis | None, OnAxis | None]:
    """What goes in and what comes out where everything that is cut is reduced."""
    on_axis = ragged_of(operand.spec)
    if on_axis is None:
        return None, None
    ragged = on_axis.placement
    assert isinstance(ragged, RaggedShard)
    given: Placement = ragged
    if kind == "mean":
        given = Filled(ragged, 0.0, weighted=True)
    elif 0 in ragged.local_units and (value := _neutral(kind)) is not None:
        given = Filled(ragged, value)
    return OnAxis(on_axis.axis, given), OnAxis(on_axis.axis, _partial(kind))


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


def _kind(question: Question, kind: str) -> str:
    if kind != "norm":
        return kind
    for name in ("ord", "p"):
        order = question.argument(name)
        if isinstance(order, int | float | str):
            return f"norm {float(order)}"
    return "norm 2.0"


def _dims(question: Question, ndim: int) -> set[int]:
    dims = question.argument("dim")
    if isinstance(dims, int):
        dims = [dims]
    if not isinstance(dims, list | tuple) or not dims:
        return set(range(ndim))
    return {dim % ndim for dim in dims if isinstance(dim, int)} if ndim else set()
