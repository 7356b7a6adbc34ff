"""The elements of a tensor that each rank has, as data for both renderers.

They follow from the tensor's shape, the mesh's shape and the placements, so no process group is
needed and nothing is sent.
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
    """The elements of a tensor that one rank has, or several ranks have in common.

    Attributes:
        ranks: ascending; more than one if an axis replicates or is Partial.
        boxes: of the global tensor, by ascending offsets; none for an empty shard.
    """

    ranks: tuple[int, ...]
    boxes: tuple[TensorBox, ...]

    @property
    def numel(self) -> int:
        """The number of elements on each of the ranks."""
        return sum(box.numel for box in self.boxes)


@dataclass(frozen=True)
class TensorParts:
    """A tensor divided among the ranks of a mesh.

    Attributes:
        shape: of the global tensor.
        mesh_shape: the size of each mesh axis.
        placements: one per axis.
        parts: one for each set of ranks that have the same elements, sorted by their lowest rank.
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
        assert total == math.prod(self.shape), f"{self} has {total} elements"

    @property
    def ranks(self) -> torch.Tensor:
        """The ranks that have each element, ascending: int64 of ``(*shape, copies)``.

        Every element has as many copies as the replicating and Partial axes have ranks.
        """
        copies = len(self.parts[0].ranks)
        result = torch.empty(*self.shape, copies, dtype=torch.int64)
        for part in self.parts:
            for box in part.boxes:
                result[_slices(box)] = torch.tensor(part.ranks)
        return result

    def part(self, rank: int) -> RankPart:
        """Returns the part of a rank.

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
    """Finds the parts of a tensor, one for each set of ranks that have the same elements.

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
    ranks_by_shard: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        # Ranks whose coordinates differ only on replicating axes have the same elements.
        key = tuple(n if shards else 0 for n, shards in zip(coordinate, sharded, strict=True))
        ranks_by_shard.setdefault(key, []).append(rank)
    parts = [
        RankPart(tuple(sorted(group)), rank_boxes(shape, mesh_shape, tuple(placements), coordinate))
        for coordinate, group in ranks_by_shard.items()
    ]
    return tuple(sorted(parts, key=lambda part: part.ranks))


def normalize(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Returns the placements with dims that are not negative."""
    return tuple(normalized(placement, ndim) for placement in placements)


def _slices(box: TensorBox) -> tuple[slice, ...]:
    return tuple(slice(n, n + size) for n, size in zip(box.offsets, box.sizes, strict=True))
