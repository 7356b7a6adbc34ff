"""Owners of whole parameters, balanced over all groups of a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from ragged_shard.planner import Layout, balance
from ragged_shard.planner.balance import work_of_shards

__all__ = ["Balance"]


class Balance:
    """What ranks have to do for the `Whole()` parameters of a model, group after group.

    Each model wants one of its own: models that are sharded alike then lie alike.
    """

    def __init__(self) -> None:
        self._busy: dict[DeviceMesh, tuple[int, ...]] = {}

    def busy(self, mesh: DeviceMesh) -> tuple[int, ...]:
        """What each rank of a mesh's last axis has to do so far."""
        return self._busy.get(mesh, (0,) * mesh.size(mesh.ndim - 1))

    def place(self, layout: Layout, work: Sequence[int], mesh: DeviceMesh) -> Layout:
        """A group's layout with its shards at the ranks that have least to do, who then have more.

        Args:
            layout: over the last axis of the mesh.
            work: of each parameter.
            mesh: of the group.
        """
        busy = self.busy(mesh)
        layout = balance(layout, work, busy)
        more = work_of_shards(layout, work)
        self._busy[mesh] = tuple(before + its for before, its in zip(busy, more, strict=True))
        return layout
