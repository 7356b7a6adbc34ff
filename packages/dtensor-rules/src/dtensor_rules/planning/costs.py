"""Computes what torch expects a redistribution to cost, without building specs.

Note: torch's planner compares candidates by `redistribute_cost`, which builds the steps of a
redistribution from one `DTensorSpec` to another and adds up their times. A `CostModel` holds one
input as it is placed, and answers for any number of targets. Costs are those of torch to the last
bit, because torch compares them for equality; tests/test_costs.py compares them.

Source: torch/distributed/tensor/_collective_utils.py and _redistribute.py of torch 2.13.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Partial

from dtensor_rules import _compat
from dtensor_rules.planning.path_search import Edges, Order, PathSearch, SearchState
from dtensor_rules.planning.step_times import INF, AxisStep, Codebook, Codes, StepTimes, Topology


class CostModel:
    """The times of redistributing one tensor from its placements to any others.

    Args:
        spec: of the tensor: no subclass, its sizes are integers, this rank is in its mesh.
        book: the codes of its placements and of all targets.
        topology: of its mesh.
    """

    def __init__(self, spec: DTensorSpec, book: Codebook, topology: Topology) -> None:
        assert spec.tensor_meta is not None
        size = spec.tensor_meta.dtype.itemsize * math.prod(spec.shape)
        self.codes = book.codes(spec.placements)
        self._book = book
        self._times = StepTimes(size, book, topology)
        self._dims = len(spec.shape)
        self._is_replicated = spec.is_replicated()
        self._order = self._order_of(spec)
        self._searches: dict[Edges, PathSearch] = {}
        self._known: dict[tuple[Codes, bool | None], float] = {}

    def cost(self, target: Codes, strided_is_order: bool | None) -> float:
        """Returns the microseconds that torch expects, infinity for what it refuses.

        Args:
            target: the placements to redistribute to.
            strided_is_order: what the target's spec is constructed with as
                ``use_strided_shard_as_shard_order``.

        Raises:
            NoPathError: no sequence of steps leads there; torch raises an AssertionError.
        """
        key = (target, strided_is_order)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._cost(target, strided_is_order)
        return known

    def _cost(self, target: Codes, strided_is_order: bool | None) -> float:
        if self._is_replicated:
            return 0.0
        book = self._book
        strided = any(book.is_strided[code] for code in target)
        order = None if strided and strided_is_order is not False else self._default_order(target)
        if target == self.codes and order == self._order:
            return 0.0
        if order is None or self._order is None:
            return INF
        strided = strided or any(book.is_strided[code] for code in self.codes)
        in_order = _is_ascending(order) and _is_ascending(self._order)
        steps: Iterable[AxisStep]
        if strided or not in_order or _compat.redistributes_by_graph():
            steps = self._shortest(SearchState(target, order))
        else:
            steps = self._greedy(target)
        return self._times.total(self.codes, steps)

    def _order_of(self, spec: DTensorSpec) -> Order | None:
        shard_order: Any = spec.shard_order  # None where strided shards stand for it
        if shard_order is None:
            return None
        axes = {entry.tensor_dim: entry.mesh_dims for entry in shard_order}
        return tuple(axes.get(dim, ()) for dim in range(self._dims))

    def _default_order(self, codes: Codes) -> Order:
        axes: list[tuple[int, ...]] = [()] * self._dims
        for axis, code in enumerate(codes):
            if (dim := self._book.dims[code]) is not None:
                axes[dim] = (*axes[dim], axis)
        return tuple(axes)

    def _greedy(self, target: Codes) -> Iterator[AxisStep]:
        """Yields the steps where all shards are plain: inner axes first, then outer ones."""
        book, now = self._book, list(self.codes)
        if len(now) > 1 and self._times.shards(self.codes) > 1:
            for axis in reversed(range(len(now))):
                after = target[axis]
                # A dim that outer axes do not shard alike has to be whole before this axis does.
                if book.is_shard[after] and not self._are_alike(now, target, axis):
                    after = book.replicate
                if now[axis] != after:
                    yield AxisStep(axis, now[axis], after)
                    now[axis] = after
        for axis, after in enumerate(target):
            if now[axis] != after:
                yield AxisStep(axis, now[axis], after)

    def _are_alike(self, now: Sequence[int], target: Codes, axis: int) -> bool:
        """Returns whether the same axes in front of one shard the dim that it is to shard."""
        book = self._book
        dim = book.dims[target[axis]]
        before, after = (
            [book.is_shard[code] and book.dims[code] == dim for code in codes[:axis]]
            for codes in (now, target)
        )
        return before == after

    def _shortest(self, goal: SearchState) -> Iterable[AxisStep]:
        edges = self._edges_to(goal.codes)
        search = self._searches.get(edges)
        if search is None:
            assert self._order is not None
            search = PathSearch(self._times, SearchState(self.codes, self._order), edges)
            self._searches[edges] = search
        return [
            AxisStep(axis, old, new)
            for before, after in itertools.pairwise(search.path(goal))
            for axis, (old, new) in enumerate(zip(before.codes, after.codes, strict=True))
            if old != new
        ]

    def _edges_to(self, target: Codes) -> Edges:
        book = self._book
        kinds = [kind for code in (*self.codes, *target) if (kind := book.kinds[code])]
        sums = [axis for axis, code in enumerate(target) if book.kinds[code] == (Partial, "sum")]
        return Edges(
            strided=tuple(dict.fromkeys(code for code in target if book.is_strided[code])),
            reductions=tuple(dict.fromkeys(reduction for _, reduction in kinds)),
            sums=tuple(sums) if _compat.SHARDS_BECOME_SUMS else (),
        )


def _is_ascending(order: Order) -> bool:
    return all(axes == tuple(sorted(axes)) for axes in order)
