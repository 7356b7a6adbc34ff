"""Which rank holds which elements of a tensor, as data that draws itself.

No process group is needed, and nothing is sent: what every rank holds follows from the shape, the
mesh's shape and the placements (rank_boxes.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.boxes import Box
from ragged_shard.fit import check_fit
from ragged_shard.rank_boxes import normalized, rank_boxes, replicates


@dataclass(frozen=True)
class Part:
    """What some ranks hold, all of them the same.

    Attributes:
        ranks: ascending; more than one where an axis replicates or is Partial.
        boxes: of the global tensor, by ascending offsets; none for an empty shard.
    """

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Elements that each of the ranks holds."""
        return sum(box.numel for box in self.boxes)


@dataclass(frozen=True)
class Ownership:
    """Which ranks hold which elements of a tensor. In a notebook it shows itself as a picture.

    Attributes:
        shape: of the global tensor.
        mesh_shape: size of each axis of the mesh.
        placements: one per axis.
        parts: what differs between ranks, by their lowest rank. Two parts have no element in
            common, and together they have all.
        axis_names: one per axis, or None.
    """

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    parts: tuple[Part, ...]
    axis_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        held = sum(part.numel for part in self.parts)
        assert held == math.prod(self.shape), f"{self} holds {held} elements"

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

    def part(self, rank: int) -> Part:
        """What a rank holds.

        Raises:
            ValueError: a rank that is not in the mesh.
        """
        for part in self.parts:
            if rank in part.ranks:
                return part
        known = sorted(rank for part in self.parts for rank in part.ranks)
        raise ValueError(f"rank {rank} is not in the mesh, which has ranks {known}")

    def text(self, width: int = 80) -> str:
        """A picture in plain characters, and what each rank holds.

        Args:
            width: of a line, in characters; larger tensors are scaled down to it.
        """
        from ragged_shard.picture.terminal import lines

        return "\n".join(line.plain for line in lines(self, width))

    def svg(self) -> str:
        """A picture as an SVG document, and what each rank holds."""
        from ragged_shard.picture.svg import svg

        return svg(self)

    def save_svg(self, path: str | Path) -> None:
        """Writes `svg` to a file."""
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()


def ownership(
    tensor: DTensor | Sequence[int],
    *,
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
) -> Ownership:
    """Which ranks hold which elements, without communication.

    Axes apply from left to right, as in torch's `compute_local_shape_and_global_offset`, and the
    ragged one last. Ranks are the mesh's own for a DTensor, and counted from 0 otherwise.

    Args:
        tensor: a DTensor, or the shape of a tensor that need not exist.
        mesh_shape: size of each axis; with a shape only.
        placements: one per axis, with a shape only: ours, Shard, _StridedShard, Replicate, Partial.

    Raises:
        TypeError: a tensor that is no DTensor; a shape without the other two, or a DTensor with one
            of them.
        ValueError: a mesh or placements that do not fit.
    """
    if isinstance(tensor, DTensor):
        if mesh_shape is not None or placements is not None:
            raise TypeError(
                "mesh_shape and placements are for a shape; a DTensor has its own: leave them out"
            )
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names
        return _ownership(
            tuple(tensor.shape),
            tuple(mesh.shape),
            tensor.placements,
            mesh.mesh.flatten().tolist(),
            tuple(names) if names else None,
        )
    if isinstance(tensor, torch.Tensor):  # type: ignore[unreachable]
        raise TypeError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} is on one device; give a "
            f"DTensor, or a shape with mesh_shape= and placements="
        )
    if mesh_shape is None or placements is None:
        raise TypeError(f"the shape {tuple(tensor)} needs both mesh_shape= and placements=")
    sizes = tuple(mesh_shape)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"mesh_shape={sizes} must hold one size of at least 1 per axis")
    return _ownership(tuple(tensor), sizes, tuple(placements), range(math.prod(sizes)), None)


def _ownership(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Placement],
    ranks: Sequence[int],
    axis_names: tuple[str, ...] | None,
) -> Ownership:
    placements = tuple(normalized(placement, len(shape)) for placement in placements)
    check_fit(shape, mesh_shape, placements)
    cut = tuple(not replicates(placement) for placement in placements)
    holders: dict[tuple[int, ...], list[int]] = {}
    every = itertools.product(*map(range, mesh_shape))
    for rank, coordinate in zip(ranks, every, strict=True):
        # Ranks that differ on replicating axes alone hold the same.
        key = tuple(index if cuts else 0 for index, cuts in zip(coordinate, cut, strict=True))
        holders.setdefault(key, []).append(rank)
    parts = [
        Part(tuple(sorted(same)), rank_boxes(shape, mesh_shape, placements, coordinate))
        for coordinate, same in holders.items()
    ]
    parts.sort(key=lambda part: part.ranks)
    return Ownership(shape, mesh_shape, placements, tuple(parts), axis_names)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(n, n + size) for n, size in zip(box.offsets, box.sizes, strict=True))
