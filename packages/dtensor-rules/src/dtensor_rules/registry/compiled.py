"""Rules that are compiled: what ``dtensor_rules/rule.h`` speaks to, in values that Python has.

Note: a placement travels as ``(kind, dim, reduce_op, object)``, a spec as ``(placements, shape of
the mesh, shape, stride, dtype)``, a plan as ``(outputs, redistribute, transform)``. The header
writes and reads the same; a change here is a new `VERSION` there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

# switch: the built-in rules come first.
from dtensor_rules import switch  # noqa: F401
from dtensor_rules.plan import Move, Plan
from dtensor_rules.redistribution import transform_between
from dtensor_rules.registry.rule import Call, Rule
from dtensor_rules.registry.table import register_rule
from dtensor_rules.registry.validation import check_axes

VERSION = 2

# The wire's tuples; the module's note has their fields.
SentPlacement: TypeAlias = tuple[str, int, str, Any]
Sent: TypeAlias = tuple[Any, ...]


def register(
    version: int,
    name: str,
    op: str,
    action: Callable[[str, list[Sent], Call], Sent | None] | None,
    kind: str,
    placements: tuple[str, ...],
    meta: Callable[[str, list[Sent], Call], bool] | None,
    numbers: bool,
    before: str | None,
    after: str | None,
) -> None:
    """Registers a rule for the header; the arguments are those of its `Rule` and `Where`.

    Raises:
        ValueError: as `Rule` and `register_rule` raise it; a rule without a name or an action.
        ImportError: the header was another version's.
    """
    if version != VERSION:
        raise ImportError(
            f"rule {name!r} was compiled with another version of dtensor_rules/rule.h "
            f"(it speaks {version}, the installed dtensor-rules {VERSION}): compile it again"
        )
    if not name:
        raise ValueError("register_rule: a compiled rule needs a name")
    if action is None:
        raise ValueError(f"Rule {name!r}: action is empty: it must be a function of one Call")

    def decide(call: Call) -> Plan | None:
        answer = action(*_sent(call))
        return None if answer is None else _plan(f"Rule {name!r}: {call.op}", call, *answer)

    def fits(call: Call) -> bool:
        assert meta is not None
        return meta(*_sent(call))

    rule = Rule(
        op,
        decide,
        kind=kind,
        placements=placements or "*",
        meta="*" if meta is None else fits,
        numbers=numbers,
        name=name,
    )
    register_rule(rule, before=before, after=after)


def _sent(call: Call) -> tuple[str, list[Sent], Call]:
    return str(call.op), [_sent_spec(spec) for spec in call.specs], call


def _sent_spec(spec: DTensorSpec) -> Sent:
    meta = spec.tensor_meta
    assert meta is not None
    placements = [_sent_placement(placement) for placement in spec.placements]
    dtype = str(meta.dtype).removeprefix("torch.")
    return placements, list(spec.mesh.shape), list(meta.shape), list(meta.stride), dtype


def _sent_placement(placement: Placement) -> SentPlacement:
    # Torch's own classes only: a subclass may mean something else, and travels as what it is.
    if type(placement) is Replicate:
        return "replicate", 0, "", None
    if type(placement) is Shard:
        return "shard", placement.dim, "", None
    if type(placement) is Partial:
        return "partial", 0, placement.reduce_op, None
    return "other", 0, "", placement


def _placement(sent: SentPlacement) -> Placement:
    kind, dim, reduce_op, other = sent
    match kind:
        case "replicate":
            return Replicate()
        case "shard":
            return Shard(dim)
        case "partial":
            return Partial(reduce_op)
    assert isinstance(other, Placement)
    return other


def _plan(
    where: str,
    call: Call,
    outputs: Iterable[Sent],
    redistribute: Mapping[int, Sequence[SentPlacement]],
    transform: Mapping[int, Callable[[torch.Tensor], torch.Tensor]],
) -> Plan:
    """Makes the plan that a compiled rule returns.

    Raises:
        ValueError: a number that no DTensor of the call has, placements that are not one per axis.
    """
    transforms: dict[int, Any] = {}
    for number, sent in redistribute.items():
        source = _numbered(where, "redistribute", call.specs, number)
        target = _placed(f"{where}: redistribute[{number}]", source, sent)
        transforms[number] = transform_between(source, target)
    for number, function in transform.items():
        _numbered(where, "transform", call.specs, number)
        if number in transforms:
            raise ValueError(f"{where}: argument {number} is both redistributed and transformed")
        transforms[number] = function
    moves = [Move(*call.places[number], transforms[number]) for number in sorted(transforms)]
    specs = [_output(where, call, index, *sent) for index, sent in enumerate(outputs)]
    return Plan(moves=moves, outputs=specs)


def _output(
    where: str,
    call: Call,
    index: int,
    placements: Sequence[SentPlacement],
    like: int,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    dtype: str | None,
) -> DTensorSpec:
    spec = _placed(
        f"{where}: output {index}", _numbered(where, "like", call.specs, like), placements
    )
    meta = spec.tensor_meta
    assert meta is not None
    if shape is not None and stride is None:
        stride = torch.empty(tuple(shape), device="meta").stride()
    result = TensorMeta(
        meta.shape if shape is None else torch.Size(shape),
        meta.stride if stride is None else tuple(stride),
        meta.dtype if dtype is None else _dtype(where, dtype),
    )
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=result)


def _dtype(where: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{where}: dtype={name!r} is none of torch's, such as 'float32'")
    return dtype


def _numbered(where: str, field: str, specs: list[DTensorSpec], number: int) -> DTensorSpec:
    if number >= len(specs):
        raise ValueError(
            f"{where}: {field}={number}: the call has {len(specs)} DTensors, counted from 0"
        )
    return specs[number]


def _placed(where: str, spec: DTensorSpec, sent: Sequence[SentPlacement]) -> DTensorSpec:
    """Returns the spec of the same tensor with other placements."""
    placements = tuple(_placement(one) for one in sent)
    placed = DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    check_axes(where, placed)
    return placed
