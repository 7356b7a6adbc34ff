"""Which rank holds which elements of a tensor, as data: what both renderers draw.

No process group is needed, and nothing is sent: what every rank holds follows from the shape, the
mesh's shape and the placements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.geometry.boxes import TensorBox
from ragged_shard.geometry.stored_boxes import normalized, rank_boxes, replicates
from ragged_shard.geometry.validation import check_fit


@dataclass(frozen=True)
class RankPart:
    """The part of a tensor that one rank holds, or several ranks hold alike.

    Attributes:
        ranks: ascending; more than one where an axis replicates or is Partial.
        boxes: of the global tensor, by ascending offsets; none for an empty shard.
    """

    ranks: tuple[int, ...]
    boxes: tuple[TensorBox, ...]

    @property
    def numel(self) -> int:
        """The number of elements that each of the ranks holds."""
        return sum(box.numel for box in self.boxes)


@dataclass(frozen=True)
class TensorParts:
    """A tensor divided among the ranks of a mesh.

    Attributes:
        shape: of the global tensor.
        mesh_shape: the size of each mesh axis.
        placements: one per axis.
        parts: one for each set of ranks that hold the same elements, sorted by their lowest rank.
            Parts are disjoint, and together they cover the tensor.
        axis_names: one per axis, or None.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    parts: tuple[RankPart, ...]
    axis_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        total = sum(part.numel for part in self.parts)
        assert total == math.prod(self.shape), f"{self} holds {total} elements"

    @property
    def ranks(self) -> torch.Tensor:
        """The ranks that hold each element, ascending: int64 of ``(*shape, holders)``.

        Every element has as many holders as the replicating and Partial axes have ranks.
        """
        holders = len(self.parts[0].ranks)
        result = torch.empty(*self.shape, holders, dtype=torch.int64)
        for part in self.parts:
            for box in part.boxes:
                result[_slices(box)] = torch.tensor(part.ranks)
        return result

    def part(self, rank: int) -> RankPart:
        """Returns what a rank holds.

        Raises:
            ValueError: the rank is not in the mesh.
        """
        for part in self.parts:
            if rank in part.ranks:
                return part
        known = sorted(rank for part in self.parts for rank in part.ranks)
        raise ValueError(f"expected a rank of the mesh, one of {known}, got {rank}")


def find_parts(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    ranks: Sequence[int],
) -> tuple[RankPart, ...]:
    """Finds the parts of a tensor, one for each set of ranks that hold the same elements.

    Args:
        shape: of the global tensor.
        mesh_shape: the size of each mesh axis.
        placements: one per axis, with dims that are not negative.
        ranks: of the mesh, in row-major order.

    Raises:
        ValueError: the placements do not fit the tensor or the mesh.
    """
    check_fit(shape, mesh_shape, tuple(placements))
    sharded = tuple(not replicates(placement) for placement in placements)
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        # Ranks that differ on replicating axes only hold the same elements.
        key = tuple(n if shards else 0 for n, shards in zip(coordinate, sharded, strict=True))
        holders.setdefault(key, []).append(rank)
    parts = [
        RankPart(tuple(sorted(same)), rank_boxes(shape, mesh_shape, tuple(placements), coordinate))
        for coordinate, same in holders.items()
    ]
    return tuple(sorted(parts, key=lambda part: part.ranks))


def normalize(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Returns the placements with dims that are not negative."""
    return tuple(normalized(placement, ndim) for placement in placements)


def _slices(box: TensorBox) -> tuple[slice, ...]:
    return tuple(slice(n, n + size) for n, size in zip(box.offsets, box.sizes, strict=True))
