"""What a buffer's placements may be, and as what a tensor in it is placed."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_shard import (
    RaggedShard,
    StridedRaggedShard,
    dim_of,
    even_shape,
    largest_shape,
    local_shape,
)
from ragged_shard.planner import Interval

__all__ = [
    "Inner", "LocalTensor", "Placements", "axis_index", "checked_inner", "checked_placements",
    "is_sharded", "of_tensor",
]  # fmt: skip

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Inner:
    """The placement of a buffer's tensor on axes that are not the buffer's, such as TP's and EP's.

    The layout is then of the local tensor of these axes, which the buffer shards further. Where the
    axes divide dim 0 unevenly, as a vocabulary or experts, it is of the largest local tensor, so
    that all ranks have the same layout: a smaller one is the begin of its place in the buffer, and
    the rest is padding. Where they divide another dim unevenly, whose rows are then shorter, the
    layout's block is the whole tensor, which one rank has.

    Attributes:
        mesh: of named axes, the buffer's among them.
        placements: one for each axis that is not the buffer's, in the order of `mesh`.
        shape: of the global tensor.
    """

    mesh: DeviceMesh
    placements: Placements
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "placements", tuple(self.placements))
        object.__setattr__(self, "shape", tuple(self.shape))


def checked_placements(
    placements: Sequence[Placement], mesh: DeviceMesh, shard_axis: int
) -> Placements:
    """Checks the placements of a buffer and returns them.

    Raises:
        ValueError: not one per axis, or one that a buffer cannot have.
    """
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"DBuffer: expected a placement for each of the {mesh.ndim} axes of the mesh "
            f"{tuple(mesh.shape)}, got {len(placements)}: {placements}"
        )
    for axis, placement in enumerate(placements):
        ok = isinstance(placement, Replicate) or (
            isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")
        )
        if not (ok or is_sharded(placement)):
            raise ValueError(
                f"DBuffer: expected Shard(0), Replicate(), Partial('sum') or Partial('avg') on "
                f"axis {axis}, as a buffer is flat, got {placement!r}"
            )
        if is_sharded(placement) and axis != shard_axis:
            raise ValueError(
                f"DBuffer: expected placements that shard along axis {shard_axis}, the only one "
                f"that shards, got {placements}; flatten several axes into one "
                f"(mesh[...]._flatten()), or give shard_axis={axis}"
            )
    return placements


def is_sharded(placement: Placement) -> bool:
    """Whether a rank has only its shard of the buffer."""
    return isinstance(placement, Shard) and placement.dim == 0


def axis_index(mesh: DeviceMesh, axis: int | str, what: str) -> int:
    """Returns the number of an axis, given its number or name.

    Raises:
        ValueError: there is no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, SupportsIndex) and -mesh.ndim <= operator.index(axis) < mesh.ndim:
        return operator.index(axis) % mesh.ndim
    raise ValueError(
        f"DBuffer: expected {what} to be a number from 0 to {mesh.ndim - 1}"
        + (f" or one of {names}" if names else "")
        + f", got {axis!r}"
    )


def of_tensor(
    ragged: RaggedShard, mesh: DeviceMesh, placements: Placements, inner: Inner | None
) -> Placements:
    """Returns the placements of a buffer's tensor on its mesh, or on that of its other axes.

    Args:
        ragged: what stands for the buffer's shards.
        mesh: the buffer's.
        placements: the buffer's.
        inner: of the tensor.
    """
    own = [ragged if is_sharded(placement) else placement for placement in placements]
    if inner is None:
        return tuple(own)
    named = dict(zip(mesh.mesh_dim_names or (), own, strict=True))
    others = iter(inner.placements)
    names = inner.mesh.mesh_dim_names or ()
    result = [named[name] if name in named else next(others) for name in names]
    for axis, placement in enumerate(result):
        if placement is not ragged:
            continue
        after = zip(inner.mesh.shape[axis + 1 :], result[axis + 1 :], strict=True)
        pieces = math.prod(size for size, other in after if dim_of(other) == 0)
        if pieces > 1:
            result[axis] = StridedRaggedShard(
                ragged.dims, ragged.local_units, pieces, ragged.unit_length
            )
    return tuple(result)


@dataclass(frozen=True)
class LocalTensor:
    """This rank's local tensor of a buffer's tensor, unsharded on the buffer's axes.

    Attributes:
        shape: the layout's, or one with fewer rows.
        bases_differ: whether other axes divide a dim unevenly; see `Inner`.
    """

    shape: tuple[int, ...]
    bases_differ: bool = False

    def part_of(self, part: Interval) -> Interval:
        """Returns what a part of the layout's tensor has of this one."""
        numel = math.prod(self.shape)
        return Interval(min(part.start, numel), min(part.stop, numel))


def checked_inner(
    inner: Inner, mesh: DeviceMesh, shape: tuple[int, ...], block: int, what: str
) -> LocalTensor:
    """Returns the local tensor of a tensor's other axes, which have to go with a buffer.

    Args:
        inner: of the tensor.
        mesh: the buffer's.
        shape: of the tensor, as the layout has it.
        block: of the tensor, in elements.
        what: names the tensor.

    Raises:
        ValueError: axes without names, or not the buffer's among them; too few placements; a dim
            other than the first is divided unevenly, and the block is not the whole tensor; a
            layout for another local shape. All ranks agree.
    """
    names, own = inner.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not own or not set(own) <= set(names):
        raise ValueError(
            f"DBuffer: expected the inner mesh of {what} to have named axes, the buffer's {own} "
            f"among them, got {names}"
        )
    others = [axis for axis, name in enumerate(names) if name not in own]
    if len(inner.placements) != len(others):
        raise ValueError(
            f"DBuffer: expected an inner placement of {what} for each of the axes "
            f"{tuple(names[axis] for axis in others)}, got {inner.placements}"
        )
    local = inner.shape
    for axis, placement in zip(others, inner.placements, strict=True):
        if dim_of(placement) == 0 or block >= math.prod(shape):
            continue
        size = inner.mesh.size(axis)
        left = even_shape(local, (size,), (placement,))
        if left is None:
            wanted = size * getattr(placement, "interleaves", 1)
            raise ValueError(
                f"DBuffer: expected {what} to be sharded evenly on axis {names[axis]!r} of {size} "
                f"ranks, got {placement} of shape {inner.shape}; pad dim {dim_of(placement)} to a "
                f"multiple of {wanted}, or plan the layout with a block of all its "
                f"{math.prod(shape)} elements, which one rank has then"
            )
        local = left
    sizes = [inner.mesh.size(axis) for axis in others]
    largest = largest_shape(inner.shape, sizes, inner.placements)
    if largest != shape:
        raise ValueError(
            f"DBuffer: expected a layout of {what} with its local shape {largest} under "
            f"{inner.placements} of {inner.shape}, got {shape}; plan the layout with local shapes"
        )
    if even_shape(inner.shape, sizes, inner.placements) is not None:
        return LocalTensor(shape)
    given = iter(inner.placements)
    placements = tuple(next(given) if axis in others else Replicate() for axis in range(len(names)))
    return LocalTensor(local_shape(inner.shape, inner.mesh, placements), bases_differ=True)
