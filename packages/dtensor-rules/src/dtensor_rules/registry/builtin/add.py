"""`<add, *, partial-replicate, *>`: adding a replica to a partial sum, without communication."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_rules import _compat
from dtensor_rules.plan import Move, Plan
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.rule import Rule


def add_partial(call: Call) -> Plan | None:
    """Adds the replicated tensor on the first rank of the axis only, and zero on the others.

    Source: veScale, section 6.1. Exact: torch divides the replica by the number of ranks instead,
    so its sum rounds where this one does not.
    """
    if len(call.specs) != 2 or call.specs[0].mesh != call.specs[1].mesh:
        return None
    left, right = call.specs
    if left.tensor_meta != right.tensor_meta:
        return None  # broadcast, or promoted: torch says what comes out
    zeroed = {0: False, 1: False}
    placements: list[Placement] = []
    for axis, pair in enumerate(zip(left.placements, right.placements, strict=True)):
        replica = _replica(pair)
        if replica is None:
            return None
        partial = pair[1 - replica]
        placements.append(partial)
        if type(partial) is Partial and type(pair[replica]) is Replicate:
            if replica == 0 and not _compat.partial_second_stays():
                return None
            zeroed[replica] |= left.mesh.get_local_rank(axis) != 0
    moves = [Move(index, -1, torch.zeros_like) for index, zero in zeroed.items() if zero]
    return Plan(moves=moves, outputs=[call.output(placements)])


def _replica(pair: tuple[Placement, Placement]) -> int | None:
    """Returns which operand is replicated beside a partial sum; 0 if equal; None for others."""
    if pair[0] == pair[1]:
        return 0 if _adds(pair[0]) else None
    for index in (0, 1):
        other = pair[1 - index]
        if type(pair[index]) is Replicate and type(other) is Partial and other.reduce_op == "sum":
            return index
    return None


def _adds(placement: Placement) -> bool:
    """Whether shards that are placed so add up to shards of the sum that are placed so."""
    if type(placement) is Partial:
        return placement.reduce_op in ("sum", "avg")
    return type(placement) in (Replicate, Shard)


ADD_PARTIAL = Rule(
    "aten.add.Tensor",
    add_partial,
    placements=("partial", "replicate"),
    numbers=False,
    name="partial + replicate",
)
ADD_TO_PARTIAL = Rule(
    "aten.add.Tensor",
    add_partial,
    placements=("replicate", "partial"),
    numbers=False,
    name="replicate + partial",
)
