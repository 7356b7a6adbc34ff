"""Computes what torch expects a redistribution to cost, without building specs.

Note: torch's planner compares candidates by `redistribute_cost`, which builds the steps of a
redistribution from one `DTensorSpec` to another and adds up their times. Where a placement is a
`_StridedShard`, or a dim is sharded in another order than that of the mesh axes, the steps come
from a graph search (`DTensorRedistributePlanner.find_min_cost_path`), which torch repeats for
every input of every candidate on specs that it makes for every edge. A `CostModel` holds one input
as it is placed, and answers for any number of targets: placements are small integers in it, and
one search serves all targets. Costs are those of torch to the last bit, because torch compares
them for equality; tests/test_costs.py compares them.

Source: torch/distributed/tensor/_collective_utils.py and _redistribute.py of torch 2.13.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from dtensor_rules import _compat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Placements of one tensor, one code per mesh axis.
Codes = tuple[int, ...]
#: For every tensor dim the mesh axes that shard it, in the order in which they do.
Order = tuple[tuple[int, ...], ...]

INF = math.inf


class NoPathError(Exception):
    """Raised where torch's graph search finds no steps between two placements."""


class State(NamedTuple):
    """How a tensor is placed, for the graph search."""

    codes: Codes
    order: Order


class Step(NamedTuple):
    """A change of the placement on one mesh axis."""

    axis: int
    before: int
    after: int


class Codebook:
    """Numbers the placements that a decision deals with, and answers what torch asks of them.

    Attributes:
        placements: the placement of each code.
        dims: the tensor dim that a code shards, or None.
        is_shard: what `Placement.is_shard()` says, which is False for `_StridedShard`.
        is_strided: whether it is a `_StridedShard`.
        is_replicate: what `Placement.is_replicate()` says.
        is_partial: what `Placement.is_partial()` says.
        counts: whether torch counts it among a tensor's shards.
        kinds: class and reduction of a partial placement, or None.
        replicate: the code of `Replicate()`.
    """

    def __init__(self) -> None:
        self._codes: dict[Placement, int] = {}
        self.placements: list[Placement] = []
        self.dims: list[int | None] = []
        self.is_shard: list[bool] = []
        self.is_strided: list[bool] = []
        self.is_replicate: list[bool] = []
        self.is_partial: list[bool] = []
        self.counts: list[bool] = []
        self.kinds: list[tuple[type, str] | None] = []
        self.replicate = self.code(Replicate())
        self._shards: dict[int, int] = {}

    def shard(self, dim: int) -> int:
        """Returns the code of `Shard(dim)`."""
        code = self._shards.get(dim)
        if code is None:
            code = self._shards[dim] = self.code(Shard(dim))
        return code

    def partial(self, reduction: str) -> int:
        """Returns the code of `Partial(reduction)`."""
        return self.code(Partial(reduction))

    def code(self, placement: Placement) -> int:
        """Returns the code of a placement; equal placements have one."""
        code = self._codes.get(placement)
        if code is None:
            code = self._codes[placement] = len(self.placements)
            strided = isinstance(placement, _StridedShard)
            sharding = strided or isinstance(placement, Shard)
            self.placements.append(placement)
            self.dims.append(placement.dim if sharding else None)  # type: ignore[attr-defined]
            self.is_shard.append(placement.is_shard())
            self.is_strided.append(strided)
            self.is_replicate.append(placement.is_replicate())
            self.is_partial.append(placement.is_partial())
            self.counts.append(sharding and (_compat.STRIDED_SHARDS_COUNT or not strided))
            partial = isinstance(placement, Partial)
            self.kinds.append((type(placement), placement.reduce_op) if partial else None)  # type: ignore[attr-defined]
        return code

    def codes(self, placements: Sequence[Placement]) -> Codes:
        """Returns the codes of several placements."""
        return tuple(self.code(placement) for placement in placements)


class Topology:
    """The sizes, latencies and bandwidths that torch assumes of a mesh.

    Args:
        mesh: any mesh that this rank is part of.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        topology = _compat.mesh_topology(mesh)
        self.sizes: list[int] = topology.mesh_dim_devices
        self._bandwidths: list[float] = topology.mesh_dim_bandwidth
        self._latencies: list[float] = topology.mesh_dim_latency

    def gather(self, gigabytes: float, axis: int) -> float:
        """Returns the microseconds of an all-gather or a reduce-scatter on a mesh axis."""
        hops = self.sizes[axis] - 1
        return self._time(gigabytes, axis, hops)

    def reduce(self, gigabytes: float, axis: int) -> float:
        """Returns the microseconds of an all-reduce on a mesh axis."""
        hops = 2 * (self.sizes[axis] - 1)
        return self._time(gigabytes, axis, hops)

    def least(self, axis: int) -> float:
        """Returns what no collective on a mesh axis is below: the latency of a gather."""
        return self.gather(0.0, axis)

    def _time(self, gigabytes: float, axis: int, hops: int) -> float:
        latency = 6.6 + hops * self._latencies[axis]
        seconds = (gigabytes * hops / self.sizes[axis]) / self._bandwidths[axis]
        return latency + seconds * 1e6


class _StepTimes:
    """The times of single steps of redistributions of one tensor.

    Args:
        size: of the whole tensor, in bytes.
        book: the codes of its placements.
        topology: of its mesh.
    """

    def __init__(self, size: int, book: Codebook, topology: Topology) -> None:
        self.book, self.topology = book, topology
        self._bytes = size

    def local_gigabytes(self, codes: Codes) -> float:
        """Returns the size of a rank's part under these placements."""
        return self._bytes / self.shards(codes) / 1024 / 1024 / 1024

    def shards(self, codes: Codes) -> int:
        """Returns into how many parts torch takes these placements to split the tensor."""
        sizes, counts = self.topology.sizes, self.book.counts
        return math.prod(sizes[axis] for axis, code in enumerate(codes) if counts[code])

    def step(self, axis: int, before: int, after: int, gigabytes: float) -> tuple[float, float]:
        """Returns the time of a step on one axis, and the size of a rank's part after it."""
        book, topology = self.book, self.topology
        size = topology.sizes[axis]
        if book.is_shard[before]:
            if book.is_replicate[after]:
                return topology.gather(gigabytes * size, axis), gigabytes * size
            if book.is_shard[after]:
                return topology.gather(gigabytes, axis) + 1.0, gigabytes
            return (INF if book.is_partial[after] else 0.0), gigabytes
        if book.is_partial[before]:
            if book.is_replicate[after]:
                return topology.reduce(gigabytes, axis), gigabytes
            if book.is_shard[after]:
                return topology.gather(gigabytes, axis), gigabytes / size
            return (INF if book.is_partial[after] else 0.0), gigabytes
        if book.is_replicate[before] and book.is_shard[after]:
            return 0.0, gigabytes / size
        return 0.0, gigabytes

    def total(self, start: Codes, steps: Iterable[Step]) -> float:
        """Returns the time of several steps one after another."""
        total, gigabytes = 0.0, self.local_gigabytes(start)
        for step in steps:
            time, gigabytes = self.step(step.axis, step.before, step.after, gigabytes)
            if time == INF:
                return INF
            total += time
        return total


class _Edges(NamedTuple):
    """Which placements the paths to a target may lead through.

    Attributes:
        strided: the strided shards that a replica may become.
        reductions: those of the partial values that a replica may become.
        sums: the axes on which a shard may become a partial sum.
    """

    strided: Codes
    reductions: tuple[str, ...]
    sums: tuple[int, ...]


class _Search:
    """Torch's graph search from one state of a tensor, as far as it has been asked.

    Torch searches anew for every target. The order in which states are settled does not depend on
    the target, but for the strided shards and reductions in it: one search has the paths to all.

    Args:
        times: of the tensor's steps.
        start: its state.
        edges: what paths may lead through, as the target says.
    """

    def __init__(self, times: _StepTimes, start: State, edges: _Edges) -> None:
        self._times, self._edges = times, edges
        self._sum = times.book.partial("sum")
        self._settled: dict[State, State | None] = {}
        self._pushed = itertools.count()
        self._heap: list[tuple[float, int, State, State | None]] = [
            (0.0, next(self._pushed), start, None)
        ]

    def path(self, goal: State) -> list[State]:
        """Returns the states from the start to the goal, both included.

        Raises:
            NoPathError: there is none.
        """
        while goal not in self._settled:
            self._settle_next()
        path: list[State] = [goal]
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
            after = State((*state.codes[:axis], code, *state.codes[axis + 1 :]), order)
            if after not in self._settled:
                time, _ = self._times.step(axis, state.codes[axis], code, gigabytes)
                heapq.heappush(self._heap, (cost + time, next(self._pushed), after, state))
        for axis, order in self._sums(state):  # free for the search, though not for the path
            after = State((*state.codes[:axis], self._sum, *state.codes[axis + 1 :]), order)
            if after not in self._settled:
                heapq.heappush(self._heap, (cost, next(self._pushed), after, state))

    def _neighbours(self, state: State) -> Iterator[tuple[int, int, Order]]:
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
                if _may_mix({reduction, *(kind[1] for c in codes if (kind := book.kinds[c]))}):
                    yield axis, book.partial(reduction), order
        for dim, axis in last:  # 8
            if book.is_strided[codes[axis]]:
                yield axis, book.replicate, _moved(order, axis, dim, None)
        for axis in replicated:  # 11
            for code in self._edges.strided:
                yield axis, code, _moved(order, axis, None, book.dims[code])

    def _sums(self, state: State) -> Iterator[tuple[int, Order]]:
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


def _may_mix(reductions: set[str]) -> bool:
    return len(reductions) <= 1 or reductions == {"sum", "avg"}


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
        self._times = _StepTimes(size, book, topology)
        self._dims = len(spec.shape)
        self._is_replicated = spec.is_replicated()
        self._order = self._order_of(spec)
        self._searches: dict[_Edges, _Search] = {}
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
        steps: Iterable[Step]
        if strided or not in_order or _compat.redistributes_by_graph():
            steps = self._shortest(State(target, order))
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

    def _greedy(self, target: Codes) -> Iterator[Step]:
        """Yields the steps where all shards are plain: inner axes first, then outer ones."""
        book, now = self._book, list(self.codes)
        if len(now) > 1 and self._times.shards(self.codes) > 1:
            for axis in reversed(range(len(now))):
                after = target[axis]
                # A dim that outer axes do not shard alike has to be whole before this axis does.
                if book.is_shard[after] and not self._are_alike(now, target, axis):
                    after = book.replicate
                if now[axis] != after:
                    yield Step(axis, now[axis], after)
                    now[axis] = after
        for axis, after in enumerate(target):
            if now[axis] != after:
                yield Step(axis, now[axis], after)

    def _are_alike(self, now: Sequence[int], target: Codes, axis: int) -> bool:
        """Returns whether the same axes in front of one shard the dim that it is to shard."""
        book = self._book
        dim = book.dims[target[axis]]
        before, after = (
            [book.is_shard[code] and book.dims[code] == dim for code in codes[:axis]]
            for codes in (now, target)
        )
        return before == after

    def _shortest(self, goal: State) -> Iterable[Step]:
        edges = self._edges_to(goal.codes)
        search = self._searches.get(edges)
        if search is None:
            assert self._order is not None
            search = _Search(self._times, State(self.codes, self._order), edges)
            self._searches[edges] = search
        return [
            Step(axis, old, new)
            for before, after in itertools.pairwise(search.path(goal))
            for axis, (old, new) in enumerate(zip(before.codes, after.codes, strict=True))
            if old != new
        ]

    def _edges_to(self, target: Codes) -> _Edges:
        book = self._book
        kinds = [kind for code in (*self.codes, *target) if (kind := book.kinds[code])]
        sums = [axis for axis, code in enumerate(target) if book.kinds[code] == (Partial, "sum")]
        return _Edges(
            strided=tuple(dict.fromkeys(code for code in target if book.is_strided[code])),
            reductions=tuple(dict.fromkeys(reduction for _, reduction in kinds)),
            sums=tuple(sums) if _compat.SHARDS_BECOME_SUMS else (),
        )


def _is_ascending(order: Order) -> bool:
    return all(axes == tuple(sorted(axes)) for axes in order)
