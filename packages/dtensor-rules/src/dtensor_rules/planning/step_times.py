"""Times single steps of redistributions as torch's planner does, on placements by number.

Source: torch/distributed/tensor/_collective_utils.py of torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

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

INF = math.inf


class AxisStep(NamedTuple):
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


class StepTimes:
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

    def total(self, start: Codes, steps: Iterable[AxisStep]) -> float:
        """Returns the time of several steps one after another."""
        total, gigabytes = 0.0, self.local_gigabytes(start)
        for step in steps:
            time, gigabytes = self.step(step.axis, step.before, step.after, gigabytes)
            if time == INF:
                return INF
            total += time
        return total
