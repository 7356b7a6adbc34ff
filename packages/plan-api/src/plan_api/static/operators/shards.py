"""How the local tensors of an operator are placed, as the plan says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from plan_api.ops.cross_entropy import LogitsSharding
from plan_api.ops.function_calls import TorchFunction
from plan_api.runtime.attribution import preparing
from plan_api.runtime.local_redistribute import local_redistribution
from plan_api.static.shadow_model import is_fake

__all__ = ["MakeReplacement", "Placements", "as_dtensor", "sharding_of_classes", "shards_of"]

Placements: TypeAlias = tuple[Placement, ...]
# Makes what is called instead of a function whose inputs have these placements on the mesh.
MakeReplacement: TypeAlias = Callable[[TorchFunction, DeviceMesh, Placements], TorchFunction]


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Returns a DTensor of a local tensor, without communication."""
    return DTensor.from_local(local, mesh, placements, run_check=False)


def shards_of(mesh: DeviceMesh, placements: Placements) -> list[tuple[int, int]]:
    """Returns the sharded dims, each with the number of its shards."""
    return [
        (dim, mesh.size(axis))
        for axis, placement in enumerate(placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]


def sharding_of_classes(
    tensor: torch.Tensor,
    dim: int,
    mesh: DeviceMesh,
    placements: Placements,
    what: str,
) -> LogitsSharding:
    """Returns how logits or a table are sharded along a dim of classes.

    Their shards may be uneven, so the ranks gather their lengths.
    """
    of_classes = [
        at for at, placement in enumerate(placements) if getattr(placement, "dim", None) == dim
    ]
    rows = [
        at
        for at, placement in enumerate(placements)
        if at not in of_classes and not placement.is_replicate()
    ]
    if len(of_classes) > 1:
        raise ValueError(
            f"{what}: expected a shard along one axis at most, got {placements}; use mode='eager'"
        )
    if not of_classes:
        return LogitsSharding(mesh, dim, None, 0, tensor.shape[dim], tuple(rows))
    (axis,) = of_classes
    own = torch.tensor([tensor.shape[dim]], device=tensor.device)
    gather = local_redistribution(Shard(0), Replicate(), mesh, axis, "lengths of shards")
    rank = mesh.get_local_rank(axis)
    with preparing():
        lengths = [tensor.shape[dim]] * mesh.size(axis) if is_fake(tensor) else gather(own).tolist()
    return LogitsSharding(mesh, dim, axis, sum(lengths[:rank]), sum(lengths), tuple(rows))
