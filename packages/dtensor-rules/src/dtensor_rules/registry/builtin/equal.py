"""`<equal, *, *, *>`: compare the shards, and ask the other ranks only where they hold others."""

from __future__ import annotations

from torch import distributed as dist
from torch.distributed.tensor import Replicate, Shard

from dtensor_rules import _core
from dtensor_rules.plan import Plan
from dtensor_rules.registry.call import Call
from dtensor_rules.registry.rule import Rule


def equal(call: Call) -> Plan | None:
    """Compares local tensors, with one all-reduce of one number if an axis is sharded.

    Source: veScale, section 6.1, and `_dispatch_fast_path_python_tail` in
    torch/distributed/tensor/_dispatch.py, which reduces over all ranks, replicas included.
    """
    if len(call.specs) != 2 or not _same_shards(call):
        return None
    left, right = call.specs
    if left.tensor_meta.shape != right.tensor_meta.shape:  # type: ignore[union-attr]
        return Plan(finish=_never)
    if all(type(placement) is Replicate for placement in left.placements):
        return Plan(outputs=[None])  # every rank has compared the same
    # Torch reduces over the whole world, ranks outside the mesh included: all of it, or none.
    if left.mesh.size() != dist.get_world_size():
        return None
    world = dist.group.WORLD
    assert world is not None
    return Plan(finish=_core.LogicalAnd(world.group_name, left.mesh.device_type))


def _same_shards(call: Call) -> bool:
    left, right = call.specs
    return (
        left.mesh == right.mesh
        and left.placements == right.placements
        and left.shard_order == right.shard_order
        and all(type(placement) in (Replicate, Shard) for placement in left.placements)
    )


def _never(same: bool) -> bool:
    """Tensors of different global shapes, whose shards may be of one shape by chance."""
    return False


EQUAL = Rule("aten.equal.default", equal, numbers=False, name="equal")
