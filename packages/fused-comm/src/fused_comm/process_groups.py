"""Makes one process group of several mesh axes."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FlatGroup", "flat_group", "flat_group_of", "group_of_ranks"]


@dataclass(frozen=True, eq=False)
class FlatGroup:
    """The ranks along some axes of a mesh, and the process group in which they communicate.

    Torch numbers the ranks of a new group by their global ranks, and a mesh may have them in any
    order. So there are two orders: a rank's *position* among the ranks of the mesh, row-major over
    the axes, which is the index of its shard; and its *group rank*, which is the row of a
    reduce-scatter that it receives.

    Attributes:
        group: the process group.
        ranks: global ranks by position.
        order: the position of each group rank.
        position: of this rank.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    order: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)


# Groups by the mesh order of their ranks, made once per default group: making one is a collective
# of its ranks, and a new default group needs new ones.
_groups: dict[tuple[int, ...], FlatGroup] = {}
_world: dist.ProcessGroup | None = None


def flat_group(
    mesh: DeviceMesh, axes: Sequence[int], timeout: datetime.timedelta | None = None
) -> FlatGroup:
    """Returns the group of the ranks along some axes of a mesh that this rank is part of.

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
            f"flat_group: expected ascending axes of a mesh of {mesh.ndim}, got axes={tuple(axes)}"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"flat_group: rank {dist.get_rank()} is not part of {mesh}")
    selection = tuple(
        slice(None) if axis in axes else index for axis, index in enumerate(coordinate)
    )
    ranks = tuple(int(rank) for rank in mesh.mesh[selection].flatten().tolist())
    if len(axes) > 1:
        return group_of_ranks(ranks, timeout)
    known = _known(ranks)
    if known is None:
        known = _groups[ranks] = _flat(mesh.get_group(axes[0]), ranks)
    return known


def group_of_ranks(ranks: tuple[int, ...], timeout: datetime.timedelta | None = None) -> FlatGroup:
    """Returns the group of these ranks, all of which have to call; see `flat_group`.

    Args:
        ranks: global ranks by position.
        timeout: as in `flat_group`.
    """
    known = _known(ranks)
    if known is None:
        known = _groups[ranks] = _flat(_process_group(ranks, timeout), ranks)
    return known


def flat_group_of(group: dist.ProcessGroup) -> FlatGroup:
    """Returns a process group as a `FlatGroup` whose positions are its group ranks."""
    return _flat(group, tuple(dist.get_process_group_ranks(group)))


def _known(ranks: tuple[int, ...]) -> FlatGroup | None:
    global _world
    if _world is not dist.group.WORLD:
        _groups.clear()
        _world = dist.group.WORLD
    return _groups.get(ranks)


def _process_group(ranks: tuple[int, ...], timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    if len(ranks) == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    for known in _groups.values():  # the same ranks in another order
        if set(known.ranks) == set(ranks):
            return known.group
    # Only its own ranks take part: ranks of other pipeline stages may do something else now.
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, use_local_synchronization=True
    )
    return group


def _flat(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> FlatGroup:
    order = tuple(ranks.index(rank) for rank in dist.get_process_group_ranks(group))
    return FlatGroup(group, ranks, order, ranks.index(dist.get_rank()))
