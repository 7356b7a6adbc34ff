"""One all-gather over several mesh axes, of which at least one has a placement of this package.

The boxes of all ranks, and their order, follow from shape and placements. So the local tensors, of
equal sizes or not, are gathered as they are stored, and then copied to their positions. No process
group is created: the axes must cover a mesh of all ranks of the default group, or have been
flattened.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import _compat
from ragged_shard.geometry.boxes import contiguous_strides
from ragged_shard.geometry.specs import Placements, dim_of, local_shape, replace_axis
from ragged_shard.geometry.stored_boxes import StorageWindow, rank_stored_boxes
from ragged_shard.ragged import RaggedShard
from ragged_shard.redistribution.all_to_all import view_of
from ragged_shard.redistribution.collectives import Group, all_gather_in_group


@dataclass(frozen=True)
class GatherOverAxes:
    """The plan of a gather over several axes, the same on all of its ranks.

    Attributes:
        group: the ranks of the axes.
        rank: of this process, in the group.
        placements: of the tensor, Replicate on all other axes.
        axes: over which to gather, ascending.
        shape: of the result.
    """

    group: Group
    rank: int
    placements: Placements
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def apply(self, local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """Gathers this rank's local tensor with those of the other ranks.

        Args:
            local: of this rank, of any strides.
            mesh: the one that the gather was planned for.

        Returns:
            A contiguous tensor of `shape`.
        """
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        plan = _plan_copies(self.shape, tuple(mesh.shape), self.placements, self.axes)
        gathered = all_gather_in_group(
            local.contiguous().view(-1), plan.sizes, self.group, self.rank
        )
        if isinstance(gathered, AsyncCollectiveTensor):
            gathered = gathered.wait()
        result = gathered.new_empty(math.prod(self.shape))
        for source, target in zip(plan.sources, plan.targets, strict=True):
            view_of(result, target).copy_(view_of(gathered, source))
        return result.view(self.shape)


def plan_gather(
    shape: Sequence[int], mesh: DeviceMesh, placements: Placements, axes: Sequence[int]
) -> GatherOverAxes | None:
    """Plans the gather after which these axes replicate.

    Args:
        shape: of the global tensor.
        mesh: of the tensor.
        placements: of the tensor, one per axis.
        axes: over which to gather: sharded by a placement of this package or of torch, each.

    Returns:
        None where axis after axis has to be gathered: fewer than two axes of more than one rank,
        no process group of their ranks, another axis that shards the same dim or is ragged, a
        compiler that records, and where torch is asked not to merge collectives.
    """
    axes = tuple(sorted(axis for axis in axes if mesh.size(axis) > 1))
    if len(axes) < 2 or _compat.is_tracing() or not _compat.merges_collectives():
        return None
    others = [p for axis, p in enumerate(placements) if axis not in axes and mesh.size(axis) > 1]
    dims = {dim_of(placements[axis]) for axis in axes} - {None}
    if any(isinstance(p, RaggedShard) or dim_of(p) in dims for p in others):
        return None
    group = _group_of(mesh, axes)
    if group is None:
        return None
    rest = gathered = tuple(placements)
    for axis in range(mesh.ndim):
        if axis in axes:
            rest = replace_axis(rest, axis, Replicate())
        else:
            gathered = replace_axis(gathered, axis, Replicate())
    return GatherOverAxes(*group, gathered, axes, local_shape(shape, mesh, rest))


def _group_of(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[Group, int] | None:
    """Finds a group of the ranks of these axes in their order, and this rank's index in it."""
    flattened = _compat.flattened_mesh(mesh, axes)
    if flattened is not None:
        return (flattened, 0), flattened.get_local_rank()
    covers_mesh = math.prod(mesh.size(axis) for axis in axes) == mesh.size()
    world = _compat.default_group(mesh) if covers_mesh else None
    return None if world is None else (world, mesh.get_rank())


@dataclass(frozen=True)
class _Copies:
    """The positions of all ranks' elements in the gathered tensor and in the result.

    Attributes:
        sizes: elements of every rank's local tensor.
        sources: windows of the gathered tensor.
        targets: windows of the result, one for each of the sources.
    """

    sizes: tuple[int, ...]
    sources: tuple[StorageWindow, ...]
    targets: tuple[StorageWindow, ...]


@lru_cache(maxsize=4096)
def _plan_copies(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    axes: tuple[int, ...],
) -> _Copies:
    strides = contiguous_strides(shape)
    sizes, sources, targets, start = [], [], [], 0
    for indices in itertools.product(*(range(mesh_shape[axis]) for axis in axes)):
        at = dict(zip(axes, indices, strict=True))
        coordinate = tuple(at.get(axis, 0) for axis in range(len(mesh_shape)))
        pieces = rank_stored_boxes(shape, mesh_shape, placements, coordinate)
        for piece in pieces:
            window, box = piece.window, piece.box
            sources.append(StorageWindow(window.sizes, window.strides, start + window.offset))
            offset = sum(n * s for n, s in zip(box.offsets, strides, strict=True))
            targets.append(StorageWindow(box.sizes, strides, offset))
        sizes.append(sum(piece.box.numel for piece in pieces))
        start += sizes[-1]
    return _Copies(tuple(sizes), tuple(sources), tuple(targets))
