"""`<*, *, *, out-partial>`: a partial result has the shape that the local result has."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from dtensor_rules.plan import Plan
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.rule import Rule

aten = torch.ops.aten
_REPLICATE = Replicate()

# Per operator, the placements of its operands on one axis that make a partial sum there.
_CONTRACTED: dict[torch._ops.OpOverload, tuple[Placement, ...]] = {
    aten.mm.default: (Shard(1), Shard(0)),
    aten.bmm.default: (Shard(2), Shard(1)),
    aten.dot.default: (Shard(0), Shard(0)),
}


def out_partial(call: Call) -> Plan | None:
    """Derives placements and shape from the operands, without torch's propagation.

    Source: veScale, section 6.1.
    """
    placements = _result(call)
    return None if placements is None else Plan(outputs=[_spec_of(call, placements)])


def is_out_partial(call: Call) -> bool:
    """Whether the result is a partial sum on some axes and a replica on the others."""
    return _result(call) is not None


def _result(call: Call) -> tuple[Placement, ...] | None:
    wanted = _CONTRACTED.get(call.op)
    if wanted is None or len(call.specs) != 2 or not _conform(*call.specs):
        return None
    result: list[Placement] = []
    for placements in zip(*(spec.placements for spec in call.specs), strict=True):
        if placements == wanted and all(type(placement) is Shard for placement in placements):
            result.append(Partial())
        elif all(type(placement) is Replicate for placement in placements):
            result.append(_REPLICATE)
        else:
            return None
    return tuple(result) if any(type(placement) is Partial for placement in result) else None


def _conform(left: DTensorSpec, right: DTensorSpec) -> bool:
    """Whether they are cut alike along what is contracted; torch words the errors of others."""
    contracted = right.shape[-2] if right.ndim > 1 else right.shape[-1]
    orders = [[entry.mesh_dims for entry in spec.shard_order or ()] for spec in (left, right)]
    return left.mesh == right.mesh and left.shape[-1] == contracted and orders[0] == orders[1]


def _spec_of(
    call: Call, placements: tuple[Placement, ...]
) -> Callable[[torch.Tensor], DTensorSpec]:
    mesh = call.specs[0].mesh

    def spec_of(local: torch.Tensor) -> DTensorSpec:
        meta = TensorMeta(shape=local.shape, stride=local.stride(), dtype=local.dtype)
        return DTensorSpec(mesh, placements, tensor_meta=meta)

    return spec_of


OUT_PARTIAL = Rule("*", out_partial, meta=is_out_partial, numbers=False, name="out-partial")
