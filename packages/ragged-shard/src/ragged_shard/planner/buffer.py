"""Where the tensors of a group are placed in one global buffer, and which rank holds what.

Note [Terminology of the planner]
    group: tensors that one collective sends, and that share one buffer.
    block: elements of a tensor's flattened storage that stay on one rank. Blocks are counted from
        the tensor's start, and the last one may be shorter.
    buffer: ``world_size`` shards of ``shard_size`` elements, in rank order.
    boundary: a multiple of ``shard_size``; it may be between two blocks, never inside one.
    start: the index in the buffer of a tensor's first element.
    unit: the largest equal pieces that blocks and a shorter last block consist of; RaggedShard
        counts them.
    padding: elements of the buffer that belong to no tensor.

All sizes are in elements. Source: veScale-FSDP, section 5.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from ragged_shard.planner.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Interval:
    """The elements ``start <= element < stop``; empty if the two are equal."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The run of one tensor's elements that a rank's shard holds.

    Attributes:
        tensor: the tensor's index in ``Layout.specs``.
        interval: which of the tensor's elements.
        offset: the index of the first of them in the rank's shard.
    """

    tensor: int
    interval: Interval
    offset: int


@dataclass(frozen=True)
class BufferMap:
    """A group's tensors in one buffer of equal shards, and arithmetic on it.

    Nothing is validated on construction; ``verify`` does that. The attributes are those of
    ``Layout``.
    """

    specs: tuple[TensorSpec, ...]
    world_size: int
    alignment: int
    align_starts: bool
    order: tuple[int, ...]
    starts: tuple[int, ...]
    shard_size: int
    proved_lower_bound: int
    exact: bool

    @cached_property
    def total(self) -> int:
        """The number of elements of all tensors together."""
        return sum(spec.numel for spec in self.specs)

    @property
    def buffer_size(self) -> int:
        """The number of elements of the buffer, all shards together."""
        return self.world_size * self.shard_size

    @property
    def padding(self) -> int:
        """The number of elements of the buffer that belong to no tensor."""
        return self.buffer_size - self.total

    @property
    def padding_ratio(self) -> float:
        """Padding over the elements of all tensors; 0 if there are none. May exceed 1."""
        return self.padding / self.total if self.total else 0.0

    @property
    def lower_bound(self) -> int:
        """``ceil(total / world_size)``: the size of a shard without blocks and alignment.

        It holds for every order. ``proved_lower_bound`` is the sharper one, for this order.
        """
        return -(-self.total // self.world_size)

    def unit_size(self, i: int) -> int:
        """Returns the elements of one unit of tensor ``i``.

        That is its block if the last block is complete, and otherwise the greatest common divisor
        of the block and the size, so that all units are equal.
        """
        spec = self.specs[self._tensor(i)]
        return gcd(spec.block, spec.numel)

    def units(self, i: int) -> tuple[int, ...]:
        """Returns the units of tensor ``i`` on each rank: ``RaggedShard``'s ``local_units``.

        Returns:
            As many counts as there are ranks; times ``unit_size(i)`` they sum to its size.
        """
        unit = self.unit_size(i)
        owners = self.owners(i)
        counts = [self.part(i, rank).size // unit for rank in owners]
        before, after = owners.start, self.world_size - owners.stop
        return (0,) * before + tuple(counts) + (0,) * after

    def owners(self, i: int) -> range:
        """Returns the ranks that hold elements of tensor ``i``; none for an empty tensor."""
        spec, start = self.specs[self._tensor(i)], self.starts[i]
        if spec.numel == 0:
            return range(0)
        return range(start // self.shard_size, (start + spec.numel - 1) // self.shard_size + 1)

    def part(self, i: int, rank: int) -> Interval:
        """Returns which elements of tensor ``i`` a rank holds; empty where it holds none."""
        spec, start = self.specs[self._tensor(i)], self.starts[i]
        shard = self._shard(rank)
        first = min(max(shard.start - start, 0), spec.numel)
        return Interval(first, min(max(shard.stop - start, first), spec.numel))

    def parts(self, rank: int) -> tuple[TensorSlice, ...]:
        """Returns what a rank's shard holds, in the order of the buffer; no slice is empty."""
        shard = self._shard(rank)
        first = max(bisect_right(self._ordered_starts, shard.start) - 1, 0)
        last = bisect_left(self._ordered_starts, shard.stop)
        slices = []
        for i in self._nonempty[first:last]:
            interval = self.part(i, rank)
            if interval.size:
                offset = self.starts[i] + interval.start - shard.start
                slices.append(TensorSlice(i, interval, offset))
        return tuple(slices)

    def padding_intervals(self) -> tuple[Interval, ...]:
        """Returns the runs of the buffer that belong to no tensor, ascending; none is empty."""
        intervals, end = [], 0
        for i in self._nonempty:
            if self.starts[i] > end:
                intervals.append(Interval(end, self.starts[i]))
            end = self.starts[i] + self.specs[i].numel
        if end < self.buffer_size:
            intervals.append(Interval(end, self.buffer_size))
        return tuple(intervals)

    @cached_property
    def _nonempty(self) -> tuple[int, ...]:
        """The order without the empty tensors."""
        return tuple(i for i in self.order if self.specs[i].numel)

    @cached_property
    def _ordered_starts(self) -> tuple[int, ...]:
        return tuple(self.starts[i] for i in self._nonempty)

    def _tensor(self, i: int) -> int:
        if not 0 <= i < len(self.specs):
            raise ValueError(f"tensor: expected 0 to {len(self.specs) - 1}, got {i}")
        return i

    def _shard(self, rank: int) -> Interval:
        """Returns the range of the buffer's elements in a rank's shard."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: expected 0 to {self.world_size - 1}, got {rank}")
        return Interval(rank * self.shard_size, (rank + 1) * self.shard_size)
