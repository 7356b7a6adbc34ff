"""Searches for the steps between placements where shards are strided, or in another order.

Note: torch repeats the search for every input of every candidate of an operator, on specs that it
makes for every edge (`DTensorRedistributePlanner.find_min_cost_path`). Here states are tuples, and
one search from a tensor's placements serves all targets. States are settled in torch's sequence,
since among equally short paths torch takes the first.

Source: torch/distributed/tensor/_redistribute.py of torch 2.13.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from dtensor_rules.planning.step_times import Codes, StepTimes

#: For every tensor dim the mesh axes that shard it, in the order in which they do.
Order = tuple[tuple[int, ...], ...]


class NoPathError(Exception):
    """Raised where torch's graph search finds no steps between two placements."""


class SearchState(NamedTuple):
    """How a tensor is placed, for the graph search."""

    codes: Codes
    order: Order


class Edges(NamedTuple):
    """Which placements the paths to a target may lead through.

    Attributes:
        strided: the strided shards that a replica may become.
        reductions: those of the partial values that a replica may become.
        sums: the axes on which a shard may become a partial sum.
    """

    strided: Codes
    reductions: tuple[str, ...]
    sums: tuple[int, ...]


class PathSearch:
    """Torch's graph search from one state of a tensor, as far as it has been asked.

    Torch repeats the search for every target. The order in which states are settled does not depend
    on the target, but for the strided shards and reductions in it: one search has the paths to all.

    Args:
        times: of the tensor's steps.
        start: its state.
        edges: what paths may lead through, as the target says.
    """

    def __init__(self, times: StepTimes, start: SearchState, edges: Edges) -> None:
        self._times, self._edges = times, edges
        self._sum = times.book.partial("sum")
        self._settled: dict[SearchState, SearchState | None] = {}
        self._pushed = itertools.count()
        self._heap: list[tuple[float, int, SearchState, SearchState | None]] = [
            (0.0, next(self._pushed), start, None)
        ]

    def path(self, goal: SearchState) -> list[SearchState]:
        """Returns the states from the start to the goal, both included.

        Raises:
            NoPathError: there is none.
        """
        while goal not in self._settled:
            self._settle_next()
        path: list[SearchState] = [goal]
        while (before := self._settled[path[-1]]) is not None:
            path.append(before)
        return path[::-1]

    def _settle_next(self) -> None:
        if not self._heap:
            raise NoPathError
        cost, _, state, before = heapq.heappop(self._heap)
        if state in self._settled:
            return
        self._settled[state] = before
        gigabytes = self._times.local_gigabytes(state.codes)
        for axis, code, order in self._neighbours(state):
            after = SearchState((*state.codes[:axis], code, *state.codes[axis + 1 :]), order)
            if after not in self._settled:
                time, _ = self._times.step(axis, state.codes[axis], code, gigabytes)
                heapq.heappush(self._heap, (cost + time, next(self._pushed), after, state))
        for axis, order in self._sums(state):  # free for the search, though not for the path
            after = SearchState((*state.codes[:axis], self._sum, *state.codes[axis + 1 :]), order)
            if after not in self._settled:
                heapq.heappush(self._heap, (cost, next(self._pushed), after, state))

    def _neighbours(self, state: SearchState) -> Iterator[tuple[int, int, Order]]:
        """Yields axis, placement and order of the states one step away, in torch's sequence.

        The cases are numbered as in `DTensorRedistributePlanner.get_next_state`.
        """
        book, codes, order = self._times.book, state.codes, state.order
        dims = range(len(order))
        last = [(dim, axes[-1]) for dim, axes in enumerate(order) if axes]
        plain = [(dim, axis) for dim, axis in last if book.is_shard[codes[axis]]]
        replicated = [axis for axis, code in enumerate(codes) if book.is_replicate[code]]
        partial = [axis for axis, code in enumerate(codes) if book.is_partial[code]]
        for dim, axis in plain:  # 1: to a shard of another dim
            for other in dims:
                if other != dim:
                    yield axis, book.shard(other), _moved(order, axis, dim, other)
        for dim, axis in plain:  # 2: a shard to a replica
            yield axis, book.replicate, _moved(order, axis, dim, None)
        for axis in partial:  # 3
            yield axis, book.replicate, order
        for axis in replicated:  # 4
            for dim in dims:
                yield axis, book.shard(dim), _moved(order, axis, None, dim)
        for axis in partial:  # 5
            for dim in dims:
                yield axis, book.shard(dim), _moved(order, axis, None, dim)
        for axis in replicated:  # 6
            for reduction in self._edges.reductions:
                if may_mix({reduction, *(kind[1] for c in codes if (kind := book.kinds[c]))}):
                    yield axis, book.partial(reduction), order
        for dim, axis in last:  # 8
            if book.is_strided[codes[axis]]:
                yield axis, book.replicate, _moved(order, axis, dim, None)
        for axis in replicated:  # 11
            for code in self._edges.strided:
                yield axis, code, _moved(order, axis, None, book.dims[code])

    def _sums(self, state: SearchState) -> Iterator[tuple[int, Order]]:
        """Yields axis and order of the shards that may become a sum of the target."""
        for dim, axes in enumerate(state.order):
            axis = axes[-1] if axes else -1
            if axis in self._edges.sums and self._times.book.is_shard[state.codes[axis]]:
                yield axis, _moved(state.order, axis, dim, None)


def _moved(order: Order, axis: int, source: int | None, target: int | None) -> Order:
    """Returns the order after an axis, the last one of its dim, shards another dim or none."""
    moved = list(order)
    if source is not None:
        moved[source] = moved[source][:-1]
    if target is not None:
        moved[target] = (*moved[target], axis)
    return tuple(moved)


def may_mix(reductions: set[str]) -> bool:
    """Returns whether one tensor may be partial by all of these reductions, on several axes."""
    return len(reductions) <= 1 or reductions == {"sum", "avg"}
