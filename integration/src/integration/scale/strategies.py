"""How ranks share the work: the mesh of each way, and how a model on meta is put onto it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp
from integration.errors import UsageError
from integration.scale.shapes import Shape
from plan_api import Plan, parallelize, zoo

__all__ = [
    "NODE",
    "STRATEGIES",
    "ParallelStrategy",
    "WorldAxis",
    "axes_of",
    "distribute",
    "strategies_of",
    "strategy_named",
]

NODE = 8
"""Ranks of a node, and of tensor parallelism, which is kept within one."""

_LAYERS = r"model\.layers\.\d+"
_MIXED = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class WorldAxis:
    """An axis of the mesh.

    Attributes:
        name: "replicate", "shard" or "tp".
        size: its ranks.
        stride: how far in global ranks they are from each other.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class ParallelStrategy:
    """How ranks share the work.

    Attributes:
        name: as it is shown.
        tensor: whether a plan of the zoo cuts the model over the ranks of a node.
        sequence: whether it cuts sequences too.
        sharded: whether fully_shard cuts parameters over the other ranks; else they are replicated.
        group: over how many ranks it does, at most; None: over all that are left.
    """

    name: str
    tensor: bool = False
    sequence: bool = False
    sharded: bool = True
    group: int | None = None


STRATEGIES = (
    ParallelStrategy("FSDP"),
    ParallelStrategy("HSDP", group=256),
    ParallelStrategy("TP x DP", tensor=True, sharded=False),
    ParallelStrategy("TP+SP x DP", tensor=True, sequence=True, sharded=False),
    ParallelStrategy("TP+SP x FSDP", tensor=True, sequence=True),
)


def strategies_of(shape: Shape) -> tuple[ParallelStrategy, ...]:
    """Those that a model can be trained by: without a plan of the zoo, fully_shard's alone."""
    return tuple(way for way in STRATEGIES if shape.zoo is not None or not way.tensor)


def strategy_named(name: str) -> ParallelStrategy:
    """The way of that name.

    Raises:
        ValueError: there is none.
    """
    for way in STRATEGIES:
        if way.name == name:
            return way
    raise ValueError(f"no way {name!r}; there are {', '.join(one.name for one in STRATEGIES)}")


def axes_of(way: ParallelStrategy, ranks: int, node: int = NODE) -> tuple[WorldAxis, ...]:
    """The axes of a way's mesh, outermost first.

    Args:
        way: it is.
        ranks: of the world.
        node: ranks of a node.

    Raises:
        UsageError: the world does not divide.
    """
    tp = node if way.tensor else 1
    if ranks < 1 or ranks % tp:
        raise UsageError(
            f"{way.name} cuts the model over the {tp} ranks of a node, which do not divide a "
            f"world of {ranks}; give a multiple of {tp}"
        )
    rest = ranks // tp
    shard = min(rest, way.group or rest) if way.sharded else 1
    if rest % shard:
        raise UsageError(
            f"{way.name} shards over groups of {shard} ranks, which do not divide a world of "
            f"{ranks}; give a multiple of {shard * tp}"
        )
    sizes = [("replicate", rest // shard, shard * tp), ("shard", shard, tp), ("tp", tp, 1)]
    return tuple(WorldAxis(*one) for one in sizes if one[1] > 1) or (WorldAxis("shard", 1, 1),)


def distribute(
    model: nn.Module, shape: Shape, way: ParallelStrategy, mesh: DeviceMesh
) -> nn.Module:
    """Puts a model on meta onto a mesh of `axes_of`; matrix products are in bfloat16.

    Raises:
        ValueError: as of plan-api and fsdp.
    """
    if way.tensor:  # plans know no mixed precision: weights and gradients are bfloat16
        return parallelize(model.to(torch.bfloat16), _plan(shape, way, mesh), src_data_rank=None)
    for layer in model.get_submodule("model.layers").children():
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=_MIXED, strategy="native")
    fsdp.fully_shard(model, mesh=mesh, mp_policy=_MIXED, strategy="native")
    return model


def _plan(shape: Shape, way: ParallelStrategy, mesh: DeviceMesh) -> Plan:
    assert shape.zoo is not None
    data = [axis for axis in mesh.mesh_dim_names or () if axis != "tp"]
    make = getattr(zoo, shape.zoo)
    plan: Plan = make(mesh, tp="tp", dp=data or None, sp=way.sequence, loss_parallel=True)
    if way.sharded and data:
        plan.fully_shard(_LAYERS, data)
        plan.fully_shard("", data)
    return plan
