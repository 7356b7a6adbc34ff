"""Several mesh axes as one process group."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FlatGroup", "flat_group", "group_of_ranks", "plain_group"]


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """The ranks along some axes of a mesh, and the process group in which they communicate.

    Torch numbers the ranks of a new group by their global numbers, and a mesh may hold them in any
    order. So there are two orders: a rank's *position* among the ranks of the mesh, row-major over
    the axes, which says which shard is its own; and its *group rank*, which says which row of a
    reduce-scatter it receives.

    Attributes:
        group: the process group.
        ranks: global ranks by position.
        order: the position of each group rank.
        position: this rank's own.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


# Groups by the mesh order of their ranks, made once for each default group: making one is a
# collective of its ranks, and a new world needs new ones.
_groups: dict[tuple[int, ...], FlatGroup] = {}
_world: dist.ProcessGroup | None = None


def flat_group(
    mesh: DeviceMesh, axes: Sequence[int], timeout: datetime.timedelta | None = None
) -> FlatGroup:
    """The group of the ranks along some axes of a mesh that this rank is in.

    The first call for these ranks may make a process group, so all of them have to call. Ranks of
    other parts of the mesh need not.

    Args:
        mesh: any mesh that this rank is part of.
        axes: at least one; in ascending order, which is the order of positions.
        timeout: of the group's collectives, where one is made; by default torch's.

    Raises:
        ValueError: no axes, axes that are out of range or out of order, or this rank is not part
            of the mesh.
    """
    if not axes or list(axes) != sorted(set(axes)) or not 0 <= axes[0] <= axes[-1] < mesh.ndim:
        raise ValueError(
            f"flat_group: axes={tuple(axes)} must be ascending axes of a mesh of {mesh.ndim}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"flat_group: rank {dist.get_rank()} is not part of {mesh}")
    here = tuple(slice(None) if axis in axes else index for axis, index in enumerate(coordinate))
    ranks = tuple(int(rank) for rank in mesh.mesh[here].flatten().tolist())
    if len(axes) > 1:
        return group_of_ranks(ranks, timeout)
    known = _known(ranks)
    if known is None:
        known = _groups[ranks] = _flat(mesh.get_group(axes[0]), ranks)
    return known


def group_of_ranks(ranks: tuple[int, ...], timeout: datetime.timedelta | None = None) -> FlatGroup:
    """The group of these ranks, which all of them ask for; see `flat_group`."""
    known = _known(ranks)
    if known is None:
        known = _groups[ranks] = _flat(_group_of(ranks, timeout), ranks)
    return known


def plain_group(group: dist.ProcessGroup) -> FlatGroup:
    """A process group whose positions are its own ranks."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return _flat(group, ranks)


def _known(ranks: tuple[int, ...]) -> FlatGroup | None:
    global _world
    if _world is not dist.group.WORLD:
        _groups.clear()
        _world = dist.group.WORLD
    return _groups.get(ranks)


def _group_of(ranks: tuple[int, ...], timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    for known in _groups.values():  # the same ranks in another order
        if set(known.ranks) == set(ranks):
            return known.group
    # Only its own ranks take part: those of other pipeline stages may be elsewhere.
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True
    )
    return group


def _flat(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> FlatGroup:
    order = tuple(ranks.index(rank) for rank in dist.get_process_group_ranks(group))
    return FlatGroup(group, ranks, order, ranks.index(dist.get_rank()))
