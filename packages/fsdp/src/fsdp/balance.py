"""Owners of whole parameters, balanced over all groups of a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ragged_shard.planner import Layout, balance
from ragged_shard.planner.balance import work_of_shards

__all__ = ["Balance"]


class Balance:
    """What ranks have to do for the `Whole()` parameters of a model, group after group.

    Each model wants one of its own: models that are sharded alike then lie alike.
    """

    def __init__(self) -> None:
        self._busy: dict[Hashable, tuple[int, ...]] = {}

    def busy(self, ranks: Hashable) -> tuple[int, ...]:
        """What each rank has to do so far; nothing before the first group."""
        return self._busy.get(ranks, ())

    def place(self, layout: Layout, work: Sequence[int], ranks: Hashable) -> Layout:
        """A group's layout with its shards at the ranks that have least to do, who then have more.

        Args:
            layout: of the group.
            work: of each parameter.
            ranks: those over which it is cut: a mesh, whose last axis counts, or another key.
        """
        busy = self.busy(ranks) or (0,) * layout.world_size
        layout = balance(layout, work, busy)
        more = work_of_shards(layout, work)
        self._busy[ranks] = tuple(before + its for before, its in zip(busy, more, strict=True))
        return layout
