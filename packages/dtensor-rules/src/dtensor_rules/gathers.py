"""Merges all-gathers over several mesh axes into one.

Torch gathers a tensor that several mesh axes shard axis by axis. It merges these gathers only over
a flattened mesh, where all are of one tensor dim and in the mesh's order. An all-gather moves
elements and computes nothing, so one over all axes, followed by a permutation of blocks, gives the
same bits, whatever dims the axes shard and in whatever order.

`merge_transforms` replaces torch's own function while the library is enabled: one rank's call may
fall back to torch, and has to issue the collectives that the other ranks issue. For the same reason
whether gathers are merged depends on the placements and on the shape of the whole tensor alone,
which `transforms_with_shape` adds to what torch passes on: a transform has the shape that this rank
sees. Shards of unequal sizes are gathered axis by axis, over a flattened mesh too: torch's merged
gather places some elements of nested ones wrongly.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from dtensor_rules import _compat
from dtensor_rules._core import Axis, MultiAxisGather, Redistribution

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


class MultiAxisShard(Placement):
    """The source placement of a transform that gathers over several mesh axes at once."""

    def __init__(self, step: MultiAxisGather) -> None:
        super().__init__()
        self.step = step

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it is a shard, as torch tests before it gathers."""
        return dim is None

    def _to_replicate_tensor(
        self, local: torch.Tensor, mesh: DeviceMesh, axis: int, shape: Sequence[int]
    ) -> torch.Tensor:
        return Redistribution([self.step]).apply(local)


class Transforms(list[Any]):
    """Torch's transforms from one spec to another, with the shape of the whole tensor."""

    def __init__(self, transforms: Sequence[Any], shape: Sequence[int]) -> None:
        super().__init__(transforms)
        self.shape = tuple(shape)


def transforms_with_shape(native: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wraps torch's function that makes the transforms between two specs."""

    @functools.wraps(native)
    def transforms(src_spec: DTensorSpec, *args: Any, **kwargs: Any) -> list[Any]:
        return Transforms(native(src_spec, *args, **kwargs), src_spec.shape)

    return transforms


def merge_transforms(
    transforms: list[Any],
    mesh: DeviceMesh,
    src_placements: tuple[Placement, ...],
    dst_placements: tuple[Placement, ...],
) -> list[Any]:
    """Returns torch's transforms, merged into the fewest collectives with the same bits.

    No process group is made for it: the ranks of the axes are those of a mesh that was flattened,
    ``mesh["dp", "tp"]._flatten()``, or of the default group. Reductions are merged as torch does.

    Args:
        transforms: torch's ``_TransformInfo``, in order, none merged. Gathers are merged where
            these are `Transforms`.
        mesh: of the tensor.
        src_placements: before all of them.
        dst_placements: after all of them.

    Returns:
        torch's ``_TransformInfo``; those over several axes have the source `MultiAxisShard`, or are
        merged by torch.
    """
    if len(transforms) < 2:
        return transforms
    if (
        not isinstance(transforms, Transforms)
        or not _compat.merges_transforms()
        or _compat.is_tracing()
    ):
        return _compat.merged_by_torch(transforms, mesh, src_placements, dst_placements)
    merged: list[Any] = []
    placements = _before(transforms, src_placements)
    for are_gathers, group in itertools.groupby(transforms, _is_gather):
        run = list(group)
        if are_gathers:
            merged += _merged_gathers(run, mesh, placements, transforms.shape)
        else:
            merged += _compat.merged_by_torch(run, mesh, src_placements, dst_placements)
        for transform in run:
            placements[transform.mesh_dim] = transform.src_dst_placements[1]
    return merged


def _before(transforms: Sequence[Any], src_placements: Sequence[Placement]) -> list[Placement]:
    """Returns the placements before the first transform, as the transforms have them.

    A ``_StridedShard`` of a spec may encode an order of axes, which the transforms gather as Shard.
    """
    placements = list(src_placements)
    for transform in reversed(transforms):
        placements[transform.mesh_dim] = transform.src_dst_placements[0]
    return placements


def _is_gather(transform: Any) -> bool:
    src, dst = transform.src_dst_placements
    return isinstance(src, Shard | _StridedShard) and isinstance(dst, Replicate)


def _merged_gathers(
    gathers: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> list[Any]:
    """Merges as many successive gathers as possible; axes of one rank need none.

    Args:
        gathers: over different axes.
        mesh: of all axes.
        placements: of all axes, before the first of the gathers.
        shape: of the whole tensor.
    """
    left = [transform for transform in gathers if mesh.size(transform.mesh_dim) > 1]
    before, merged = list(placements), []
    while left:
        for count in range(len(left), 1, -1):
            one = _merge(left[:count], mesh, before, shape)
            if one is not None:
                break
        else:
            count, one = 1, left[0]
        merged.append(one)
        for transform in left[:count]:
            before[transform.mesh_dim] = Replicate()
        del left[:count]
    return merged


def _merge(
    gathers: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> Any | None:
    """Returns one transform that replaces these gathers, or None."""
    axes = sorted(transform.mesh_dim for transform in gathers)
    group = _group_of(mesh, axes)
    shard = _equal_shard(gathers, mesh, placements, shape)
    if group is None or shard is None:
        return None
    blocks = _Blocks.of_shards([mesh.size(axis) for axis in axes], shard)
    for transform in gathers:
        placement = transform.src_dst_placements[0]
        if not blocks.gather(axes.index(transform.mesh_dim), placement.dim, _parts(placement)):
            return None
    step = MultiAxisGather(
        group,
        shard=shard,
        blocks=[block.size for block in blocks.in_memory],
        order=blocks.order(),
        sizes=[math.prod(block.size for block in dim) for dim in blocks.of_dims],
    )
    return _compat.transform_of_axes(MultiAxisShard(step), mesh, tuple(axes))


def _equal_shard(
    gathers: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> list[int] | None:
    """Returns the local sizes; -1 for dims that are not gathered, which may differ on ranks.

    Returns:
        None where sizes of the others differ.
    """
    shard = [-1] * len(shape)
    for dim in {transform.src_dst_placements[0].dim for transform in gathers}:
        count = parts = 1
        for axis, placement in enumerate(placements):
            if getattr(placement, "dim", None) == dim and mesh.size(axis) > 1:
                count, parts = count * mesh.size(axis), parts * _parts(placement)
        if shape[dim] % (count * parts) != 0:
            return None
        shard[dim] = shape[dim] // count
    return shard


def _parts(placement: Any) -> int:
    """Returns the number of parts of a dim that are each divided among the ranks; 1 for Shard."""
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1


def _group_of(mesh: DeviceMesh, axes: Sequence[int]) -> Axis | None:
    """Returns the existing group of the ranks of these mesh axes, ascending."""
    flattened = _compat.flattened_mesh(mesh, tuple(axes))
    if flattened is not None:
        group = flattened.get_group().group_name
        return Axis(group=group, size=flattened.size(), rank=flattened.get_local_rank())
    is_whole = math.prod(mesh.size(axis) for axis in axes) == mesh.size()
    world = _compat.default_group(mesh) if is_whole else None
    return None if world is None else Axis(group=world, size=mesh.size(), rank=mesh.get_rank())


@dataclass(eq=False)
class _Block:
    """A number of equal pieces that a tensor dim, or a mesh axis, is divided into."""

    size: int


@dataclass
class _Blocks:
    """What a gather over several mesh axes returns, as blocks of equal pieces.

    in_memory: from the outermost to the innermost, as they follow one another in what is
        gathered: one block for each axis, then those of the shard's dims.
    of_axes: the blocks of each axis.
    of_dims: the blocks of each tensor dim, of those axes that have been gathered.
    """

    in_memory: list[_Block]
    of_axes: list[list[_Block]]
    of_dims: list[list[_Block]]

    @classmethod
    def of_shards(cls, axes: Sequence[int], shard: Sequence[int]) -> _Blocks:
        """Makes the state before any axis is gathered.

        Args:
            axes: numbers of ranks.
            shard: sizes.
        """
        of_axes, of_dims = [[_Block(size)] for size in axes], [[_Block(size)] for size in shard]
        return cls([block for [block] in (*of_axes, *of_dims)], of_axes, of_dims)

    def gather(self, axis: int, dim: int, parts: int) -> bool:
        """Puts an axis behind the first `parts` pieces of a dim: 1 of a Shard.

        Returns:
            False where these are no whole number of blocks.
        """
        blocks, before, left = self.of_dims[dim], 0, parts
        while left > 1:
            size = blocks[before].size
            if size > left and size % left == 0:
                self._split(blocks[before], left)
            elif size == 0 or left % size != 0:
                return False
            left //= blocks[before].size
            before += 1
        blocks[before:before] = self.of_axes[axis]
        return True

    def _split(self, block: _Block, outer: int) -> None:
        """Makes two blocks of one, wherever it is."""
        two = [_Block(outer), _Block(block.size // outer)]
        for blocks in (self.in_memory, *self.of_axes, *self.of_dims):
            if block in blocks:
                at = blocks.index(block)
                blocks[at : at + 1] = two

    def order(self) -> list[int]:
        """Returns the positions in memory of the dims' blocks, one dim after another."""
        return [self.in_memory.index(block) for dim in self.of_dims for block in dim]
