"""The simulated strategies: their meshes, and the distribution of a model on the meta device."""

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
"""Ranks per node, which is also the tensor parallel degree."""

_LAYERS = r"model\.layers\.\d+"
_MIXED = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class WorldAxis:
    """An axis of the mesh.

    Attributes:
        name: "replicate", "shard" or "tp".
        size: number of ranks.
        stride: difference of global ranks between neighbours.
    """

    name: str
    size: int
    stride: int


@dataclass(frozen=True)
class ParallelStrategy:
    """A combination of kinds of parallelism.

    Attributes:
        name: name in the report.
        tensor: whether a plan of the zoo makes the ranks of a node tensor parallel.
        sequence: whether the plan includes sequence parallelism.
        sharded: whether fully_shard shards parameters over the other ranks, which otherwise
            replicate them.
        group: largest number of ranks to shard over; None: all other ranks.
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
    """Returns the strategies that a model supports; tensor parallelism needs a plan of the zoo."""
    return tuple(
        strategy for strategy in STRATEGIES if shape.zoo is not None or not strategy.tensor
    )


def strategy_named(name: str) -> ParallelStrategy:
    """Returns the strategy with this name.

    Raises:
        ValueError: there is none.
    """
    for strategy in STRATEGIES:
        if strategy.name == name:
            return strategy
    names = ", ".join(one.name for one in STRATEGIES)
    raise ValueError(f"--strategies: expected some of {names}, got {name!r}; give another")


def axes_of(strategy: ParallelStrategy, ranks: int, node: int = NODE) -> tuple[WorldAxis, ...]:
    """Returns the axes of a strategy's mesh, outermost first.

    Args:
        strategy: the strategy.
        ranks: size of the world.
        node: ranks per node.

    Raises:
        UsageError: the size of the world is not divisible by the strategy's groups.
    """
    tp = node if strategy.tensor else 1
    if ranks < 1 or ranks % tp:
        raise UsageError(
            f"--ranks: expected a multiple of the {tp} ranks of a node, over which {strategy.name} "
            f"shards the model, got {ranks}; give another number"
        )
    rest = ranks // tp
    shard = min(rest, strategy.group or rest) if strategy.sharded else 1
    if rest % shard:
        raise UsageError(
            f"--ranks: expected a multiple of {shard * tp}, as {strategy.name} shards over groups"
            f" of {shard} ranks, got {ranks}; give another number"
        )
    sizes = [("replicate", rest // shard, shard * tp), ("shard", shard, tp), ("tp", tp, 1)]
    return tuple(WorldAxis(*one) for one in sizes if one[1] > 1) or (WorldAxis("shard", 1, 1),)


def distribute(
    model: nn.Module, shape: Shape, strategy: ParallelStrategy, mesh: DeviceMesh
) -> nn.Module:
    """Parallelizes a model on the meta device over a mesh of `axes_of`; it computes in bfloat16.

    Raises:
        ValueError: as in plan-api and fsdp.
    """
    if strategy.tensor:  # plans have no mixed precision: weights and gradients are bfloat16
        return parallelize(
            model.to(torch.bfloat16), _plan(shape, strategy, mesh), src_data_rank=None
        )
    for layer in model.get_submodule("model.layers").children():
        fsdp.fully_shard(layer, mesh=mesh, mp_policy=_MIXED, strategy="native")
    fsdp.fully_shard(model, mesh=mesh, mp_policy=_MIXED, strategy="native")
    return model


def _plan(shape: Shape, strategy: ParallelStrategy, mesh: DeviceMesh) -> Plan:
    assert shape.zoo is not None
    data = [axis for axis in mesh.mesh_dim_names or () if axis != "tp"]
    make = getattr(zoo, shape.zoo)
    plan: Plan = make(mesh, tp="tp", dp=data or None, sp=strategy.sequence, loss_parallel=True)
    if strategy.sharded and data:
        plan.fully_shard(_LAYERS, data)
        plan.fully_shard("", data)
    return plan
