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

from ragged_shard import RaggedShard, StridedRaggedShard, dim_of, even_shape

__all__ = ["Inner", "Placements", "axis_index", "checked_placements", "is_sharded", "of_tensor"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Inner:
    """The placement of a buffer's tensor on axes that are not the buffer's, such as TP's and EP's.

    The layout is then of the local tensor of these axes, which the buffer shards further.

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
            f"DBuffer: {len(placements)} placements {placements} for a mesh of {mesh.ndim} axes "
            f"{tuple(mesh.shape)}; give one per axis"
        )
    for axis, placement in enumerate(placements):
        ok = isinstance(placement, Replicate) or (
            isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")
        )
        if not (ok or is_sharded(placement)):
            raise ValueError(
                f"DBuffer: {placement!r} on axis {axis}; a buffer is flat: expected Shard(0), "
                f"Replicate(), Partial('sum') or Partial('avg')"
            )
        if is_sharded(placement) and axis != shard_axis:
            raise ValueError(
                f"DBuffer: placements {placements} shard axis {axis}, but the layout's shards lie "
                f"along axis {shard_axis}; one axis is sharded, flatten several into one "
                f"(mesh[...]._flatten()) or give shard_axis={axis}"
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
        f"DBuffer: {what}={axis!r} is no axis of a mesh of {mesh.ndim} axes named {names}; give a "
        f"number from 0 to {mesh.ndim - 1}" + (" or a name" if names else "")
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
            result[axis] = StridedRaggedShard(ragged.dims, ragged.local_units, pieces)
    return tuple(result)


def check_inner(inner: Inner, mesh: DeviceMesh, shape: tuple[int, ...], what: str) -> None:
    """Raises where a tensor's other axes do not go with a buffer.

    Args:
        inner: of the tensor.
        mesh: the buffer's.
        shape: of the tensor, as the layout has it.
        what: names the tensor.

    Raises:
        ValueError: axes without names, or not the buffer's among them; too few placements; ranks
            that would have unequal shards; a layout for another local shape. All ranks agree.
    """
    names, own = inner.mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not own or not set(own) <= set(names):
        raise ValueError(
            f"DBuffer: inner mesh of {what} has axes {names} and the buffer's {own}; expected "
            f"named axes, the buffer's among them"
        )
    others = [axis for axis, name in enumerate(names) if name not in own]
    if len(inner.placements) != len(others):
        raise ValueError(
            f"DBuffer: inner placements {inner.placements} of {what}; expected one for each of the "
            f"axes {tuple(names[axis] for axis in others)}"
        )
    local = inner.shape
    for axis, placement in zip(others, inner.placements, strict=True):
        size = inner.mesh.size(axis)
        left = even_shape(local, (size,), (placement,))
        if left is None:
            wanted = size * getattr(placement, "interleaves", 1)
            raise ValueError(
                f"DBuffer: {placement} of {what} of shape {inner.shape} on axis {names[axis]!r} of "
                f"{size} ranks is uneven; the same units cannot cut unequal shards, so pad dim "
                f"{dim_of(placement)} to a multiple of {wanted}"
            )
        local = left
    if local != shape:
        raise ValueError(
            f"DBuffer: {what} has local tensors of {local} under {inner.placements} of "
            f"{inner.shape}, and the layout has {shape}; plan it with the local shape that the "
            f"inner axes leave"
        )
