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
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

# switch: the built-in rules come first.
from dtensor_rules import switch  # noqa: F401
from dtensor_rules.plan import Move, Plan
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.rule import Rule
from dtensor_rules.registry.table import register_rule

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
        return None if answer is None else _plan(call, *answer)

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
    call: Call,
    outputs: Iterable[Sent],
    redistribute: Mapping[int, Sequence[SentPlacement]],
    transform: Mapping[int, Callable[[torch.Tensor], torch.Tensor]],
) -> Plan:
    """Makes the plan that a compiled rule returns.

    Raises:
        ValueError: a number that no DTensor of the call has, placements that are not one per axis.
    """
    if twice := redistribute.keys() & transform.keys():
        raise ValueError(f"argument {min(twice)} is both redistributed and transformed")
    targets = {number: _placements(sent) for number, sent in redistribute.items()}
    moves = call.redistribute(targets)
    for number, function in transform.items():
        call.numbered("transform", number)
        moves.append(Move(*call.places[number], function))
    moves.sort(key=lambda move: (move.argument, move.element))
    return Plan(moves=moves, outputs=[_output(call, *sent) for sent in outputs])


def _output(
    call: Call,
    placements: Sequence[SentPlacement],
    like: int,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    dtype: str | None,
) -> DTensorSpec:
    known = None if dtype is None else _dtype(dtype)
    return call.output(_placements(placements), like, shape, stride, known)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is none of torch's, such as 'float32'")
    return dtype


def _placements(sent: Sequence[SentPlacement]) -> list[Placement]:
    return [_placement(one) for one in sent]
