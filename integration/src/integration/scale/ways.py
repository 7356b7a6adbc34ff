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

__all__ = ["NODE", "WAYS", "Axis", "Way", "axes_of", "distribute", "way_named", "ways_of"]

NODE = 8
"""Ranks of a node, and of tensor parallelism, which is kept within one."""

_LAYERS = r"model\.layers\.\d+"
_MIXED = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Axis:
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
class Way:
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


WAYS = (
    Way("FSDP"),
    Way("HSDP", group=256),
    Way("TP x DP", tensor=True, sharded=False),
    Way("TP+SP x DP", tensor=True, sequence=True, sharded=False),
    Way("TP+SP x FSDP", tensor=True, sequence=True),
)


def ways_of(shape: Shape) -> tuple[Way, ...]:
    """Those that a model can be trained by: without a plan of the zoo, fully_shard's alone."""
    return tuple(way for way in WAYS if shape.zoo is not None or not way.tensor)


def way_named(name: str) -> Way:
    """The way of that name.

    Raises:
        ValueError: there is none.
    """
    for way in WAYS:
        if way.name == name:
            return way
    raise ValueError(f"no way {name!r}; there are {', '.join(one.name for one in WAYS)}")


def axes_of(way: Way, ranks: int, node: int = NODE) -> tuple[Axis, ...]:
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
    return tuple(Axis(*one) for one in sizes if one[1] > 1) or (Axis("shard", 1, 1),)


def distribute(model: nn.Module, shape: Shape, way: Way, mesh: DeviceMesh) -> nn.Module:
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


def _plan(shape: Shape, way: Way, mesh: DeviceMesh) -> Plan:
    assert shape.zoo is not None
    data = [axis for axis in mesh.mesh_dim_names or () if axis != "tp"]
    make = getattr(zoo, shape.zoo)
    plan: Plan = make(mesh, tp="tp", dp=data or None, sp=way.sequence, loss_parallel=True)
    if way.sharded and data:
        plan.fully_shard(_LAYERS, data)
        plan.fully_shard("", data)
    return plan
