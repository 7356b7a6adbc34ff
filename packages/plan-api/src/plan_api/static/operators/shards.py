"""What makes the replacement of an operator, and how classes or rows are sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed.tensor.placement_types import Placement

from plan_api.ops.cross_entropy import LogitsSharding
from plan_api.ops.function_calls import TorchFunction
from plan_api.runtime.local_shards import TensorSizes, chunk_offset

__all__ = ["MakeReplacement", "Placements", "Sharding", "sharding_of_classes", "shards_of"]

Placements: TypeAlias = tuple[Placement, ...]
# Makes what is called instead of a function whose inputs have these placements and global sizes.
MakeReplacement: TypeAlias = Callable[[TorchFunction, TensorSizes], TorchFunction]


@dataclass(frozen=True)
class Sharding:
    """A sharded dim.

    Attributes:
        dim: of a tensor.
        placement: along the axis that shards it.
        ranks: of the axis.
        rank: this one, on the axis.
    """

    dim: int
    placement: Placement
    ranks: int
    rank: int

    @property
    def parts(self) -> int:
        """The parts of a fused projection, each of which is sharded."""
        parts: int = getattr(self.placement, "interleaves", 1)
        return parts


def shards_of(sizes: TensorSizes) -> list[Sharding]:
    """Returns the sharded dims of a tensor."""
    mesh = sizes.mesh
    return [
        Sharding(dim, placement, mesh.size(axis), mesh.get_local_rank(axis))
        for axis, placement in enumerate(sizes.placements)
        if (dim := getattr(placement, "dim", None)) is not None
    ]


def sharding_of_classes(
    tensor: torch.Tensor,
    dim: int,
    sizes: TensorSizes,
) -> LogitsSharding:
    """Returns how logits or a table are sharded along a dim of classes."""
    mesh, placements = sizes.mesh, sizes.placements
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
            f"{sizes.what}: expected classes or rows sharded along one axis at most, got "
            f"{placements}; use mode='eager'"
        )
    if not of_classes:
        return LogitsSharding(mesh, dim, None, 0, tensor.shape[dim], tuple(rows))
    (axis,) = of_classes
    length = sizes.length(axis, dim, tensor)
    first = chunk_offset(length, mesh.size(axis), mesh.get_local_rank(axis))
    return LogitsSharding(mesh, dim, axis, first, length, tuple(rows))
