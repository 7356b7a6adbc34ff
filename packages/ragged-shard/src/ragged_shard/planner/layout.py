"""Where the tensors of a group lie in one global buffer, and which rank holds what.

Note [words of the planner]
    group: tensors that one collective carries, and that share one buffer.
    block: elements of a tensor's flattened storage that stay on one rank; counted from the
        tensor's start, the last may be shorter.
    buffer: ``world_size`` shards of ``shard_size`` elements, one behind the other.
    boundary: a multiple of ``shard_size``; it may fall between two blocks, never into one.
    start: the place in the buffer of a tensor's first element.
    unit: the largest equal pieces that blocks and a shorter last block are made of; what
        RaggedShard counts.
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
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """A run of one tensor's elements that a rank's shard holds.

    Attributes:
        tensor: the tensor's place in ``Layout.specs``.
        interval: which of the tensor's elements.
        offset: where the first of them lies in the rank's shard.
    """

    tensor: int
    interval: Interval
    offset: int


@dataclass(frozen=True)
class Layout:
    """A group's tensors in one buffer of equal shards; what ``plan_layout`` returns.

    Nothing is checked when one is made: ``verify`` does that.

    Attributes:
        specs: the tensors, in the order in which they were given.
        world_size: number of shards.
        alignment: ``shard_size`` is a multiple of it.
        align_starts: whether every start is a multiple of it too.
        order: places in ``specs``, in the order of the buffer.
        starts: start of each tensor in the buffer, in the order of ``specs``.
        shard_size: elements of each rank's shard.
        proved_lower_bound: no layout of these specs in this order has a smaller shard.
        exact: whether ``shard_size`` is the smallest for this order. If not, the search met its
            node limit, and the smallest lies between ``proved_lower_bound`` and ``shard_size``.
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
        """Elements of all tensors together."""
        return sum(spec.numel for spec in self.specs)

    @property
    def buffer_size(self) -> int:
        """Elements of the buffer, all shards together."""
        return self.world_size * self.shard_size

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.buffer_size - self.total

    @property
    def padding_ratio(self) -> float:
        """Padding over the elements of all tensors; 0 if there are none. May exceed 1."""
        return self.padding / self.total if self.total else 0.0

    @property
    def lower_bound(self) -> int:
        """``ceil(total / world_size)``: what a shard has without blocks and alignment.

        It holds for every order. ``proved_lower_bound`` is the sharper one, for this order.
        """
        return -(-self.total // self.world_size)

    def unit_size(self, i: int) -> int:
        """Elements of one unit of tensor ``i``: its block, if the last block is whole.

        Otherwise the greatest common divisor of the block and the size, so that all units are
        equal.
        """
        spec = self.specs[self._tensor(i)]
        return gcd(spec.block, spec.numel)

    def units(self, i: int) -> tuple[int, ...]:
        """Units of tensor ``i`` on each rank: ``RaggedShard``'s ``local_units``.

        Returns:
            As many counts as there are ranks; times ``unit_size(i)`` they sum to its size.
        """
        unit = self.unit_size(i)
        owners = self.owners(i)
        held = [self.part(i, rank).size // unit for rank in owners]
        before, after = owners.start, self.world_size - owners.stop
        return (0,) * before + tuple(held) + (0,) * after

    def owners(self, i: int) -> range:
        """Ranks that hold an element of tensor ``i``; an empty range for an empty tensor."""
        spec, start = self.specs[self._tensor(i)], self.starts[i]
        if spec.numel == 0:
            return range(0)
        return range(start // self.shard_size, (start + spec.numel - 1) // self.shard_size + 1)

    def part(self, i: int, rank: int) -> Interval:
        """Which elements of tensor ``i`` a rank holds; empty where it holds none."""
        spec, start = self.specs[self._tensor(i)], self.starts[i]
        shard = self._shard(rank)
        first = min(max(shard.start - start, 0), spec.numel)
        return Interval(first, min(max(shard.stop - start, first), spec.numel))

    def parts(self, rank: int) -> tuple[Part, ...]:
        """What a rank's shard holds, in the order of the buffer; no part is empty."""
        shard = self._shard(rank)
        first = max(bisect_right(self._ordered_starts, shard.start) - 1, 0)
        last = bisect_left(self._ordered_starts, shard.stop)
        found = []
        for i in self._holding[first:last]:
            held = self.part(i, rank)
            if held.size:
                found.append(Part(i, held, self.starts[i] + held.start - shard.start))
        return tuple(found)

    def padding_intervals(self) -> tuple[Interval, ...]:
        """The runs of the buffer that belong to no tensor, ascending; none is empty."""
        found, end = [], 0
        for i in self._holding:
            if self.starts[i] > end:
                found.append(Interval(end, self.starts[i]))
            end = self.starts[i] + self.specs[i].numel
        if end < self.buffer_size:
            found.append(Interval(end, self.buffer_size))
        return tuple(found)

    def explain(self) -> str:
        """Say in plain sentences which tensors and which blocks force the padding.

        It plans again with blocks loosened to see what each of them costs, so it takes some
        times as long as planning.
        """
        from ragged_shard.planner.explain import explain  # it plans, and the solver makes Layouts

        return explain(self)

    def to_json(self) -> str:
        """Return the layout as JSON: the same bytes for equal layouts, everywhere."""
        from ragged_shard.planner.serialize import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str) -> "Layout":
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: ``text`` is no layout of this version, or one that ``verify`` refuses.
        """
        from ragged_shard.planner.serialize import from_json

        return from_json(text)

    def fingerprint(self) -> str:
        """SHA-256 of ``to_json()`` in hex; ranks compare it."""
        from hashlib import sha256  # loads OpenSSL, which planning does without

        return sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def _holding(self) -> tuple[int, ...]:
        """The order without the empty tensors."""
        return tuple(i for i in self.order if self.specs[i].numel)

    @cached_property
    def _ordered_starts(self) -> tuple[int, ...]:
        return tuple(self.starts[i] for i in self._holding)

    def _tensor(self, i: int) -> int:
        if not 0 <= i < len(self.specs):
            raise ValueError(f"tensor: got {i}, wants 0 to {len(self.specs) - 1}")
        return i

    def _shard(self, rank: int) -> Interval:
        """The buffer's elements that a rank holds."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: got {rank}, wants 0 to {self.world_size - 1}")
        return Interval(rank * self.shard_size, (rank + 1) * self.shard_size)
