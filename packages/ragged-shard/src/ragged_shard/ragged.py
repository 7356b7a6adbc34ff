"""RaggedShard: each rank of a mesh axis has its own number of equal units of a tensor.

Note: the terminology of this package.
    axis: of a mesh. dim: of a tensor.
    unit: what a ragged shard never splits. The leading dims of a tensor are flattened and divided
        into equal units; a rank has some of them, contiguous in storage, in rank order.
    base: the local tensor if the ragged axis replicated, that is, with the placements of the other
        axes only. A ragged placement is always applied last, to the flattened base, at any position
        in the mesh; so units are units of the base. Where another axis divides dim 0 unevenly,
        bases have different lengths: units are then those of the longest, and a shorter base has
        the first of them.
    stored box: a box of the base, and where a rank's local tensor stores it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch.distributed.tensor.placement_types import Placement

from ragged_shard.patch_points import ensure_installed


class RaggedShard(Placement):
    """Shards a tensor such that rank i has ``local_units[i]`` of ``sum(local_units)`` equal units.

    The units partition the flattened leading dims ``dims``. ``(0,)`` does not split rows; with all
    dims, shards may begin at any element; with ``()`` the whole tensor is one unit, which one rank
    owns. The tensor must be contiguous.

    The local tensor has one dim for all of ``dims``, then the remaining dims, which are not
    sharded: a tensor of shape ``(a, b, c)`` has local tensors ``(n, b, c)`` with ``dims=(0,)`` and
    ``(n, c)`` with ``dims=(0, 1)``. With ``()`` the owner's local tensor has the tensor's shape,
    and the others the same with a first size of 0. (veScale-FSDP, section 4.)

    The first placement that is constructed calls `ragged_shard.install`, which patches torch.

    Args:
        dims: the leading dims that are sharded, ``(0, 1, ..., k)``, or ``()``; objects with
            ``__index__`` are accepted as integers, here and in ``local_units``.
        local_units: units of each rank of the axis, 0 is allowed; their sum must divide the
            product of the sizes of ``dims``.
        unit_length: size of a unit along the flattened ``dims``, for a tensor whose dim 0 another
            axis divides unevenly, such as a vocabulary under tensor parallelism: all units
            together are then the longest base, and a shorter base has the first of them, the last
            perhaps in part. None if all bases have the same length, which the units divide.

    Raises:
        ValueError: dims are not a leading prefix, units are negative or all zero, the length is
            below 1 or set without dims.
        TypeError: dims or units are not integers.

    Examples:
        >>> from torch.distributed.tensor import distribute_tensor
        >>> distribute_tensor(weight, mesh, [RaggedShard((0,), (3, 5))])   # 3/8 and 5/8 of the rows
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]
    unit_length: int | None

    def __init__(
        self, dims: Iterable[int], local_units: Iterable[int], unit_length: int | None = None
    ) -> None:
        super().__init__()
        ensure_installed()
        self.dims = _integers("dims", dims)
        self.local_units = _integers("local_units", local_units)
        self.unit_length = (
            None if unit_length is None else _integers("unit_length", (unit_length,))[0]
        )
        if self.dims != tuple(range(len(self.dims))):
            raise ValueError(
                f"RaggedShard: expected dims= of the leading dims in order, (0, 1, ..., k) or (), "
                f"got {self.dims}"
            )
        if not self.local_units or min(self.local_units) < 0:
            raise ValueError(
                f"RaggedShard: expected local_units= of one non-negative integer per rank of the "
                f"axis, got {self.local_units}"
            )
        if sum(self.local_units) == 0:
            raise ValueError(
                f"RaggedShard: expected local_units= with at least one positive number, got "
                f"{self.local_units}"
            )
        if not self.dims and sum(self.local_units) != 1:
            raise ValueError(
                f"RaggedShard: with dims=() the whole tensor is one unit: expected local_units= of "
                f"1 for one rank and 0 for the others, got {self.local_units}"
            )
        if self.unit_length is not None and (self.unit_length < 1 or not self.dims):
            raise ValueError(
                f"RaggedShard: expected unit_length= of at least 1 with dims that are sharded, or "
                f"None, got {self.unit_length} with dims={self.dims}"
            )
        self._bounds = (0, *accumulate(self.local_units))
        self._key = (type(self).__name__, *self._fields())
        self._hash = hash(self._key)

    @classmethod
    def owned_by(cls, owner: int, world_size: int) -> RaggedShard:
        """Returns the placement with which one rank of the axis has the whole tensor.

        Args:
            owner: index of the rank on the axis.
            world_size: size of the axis.

        Raises:
            ValueError: the owner is not on the axis.
        """
        if not 0 <= owner < world_size:
            raise ValueError(
                f"RaggedShard.owned_by: expected an owner from 0 to {world_size - 1}, the ranks of "
                f"the axis, got {owner}"
            )
        return RaggedShard((), (int(rank == owner) for rank in range(world_size)))

    def with_units(
        self, dims: Iterable[int], local_units: Iterable[int], unit_length: int | None = None
    ) -> RaggedShard:
        """Returns a placement of the same class with other dims and units."""
        return RaggedShard(dims, local_units, unit_length)

    @property
    def total_units(self) -> int:
        """The number of units of all ranks of the axis."""
        return self._bounds[-1]

    @property
    def owner(self) -> int | None:
        """The only rank with units; None if several have some."""
        holders = [rank for rank, units in enumerate(self.local_units) if units]
        return holders[0] if len(holders) == 1 else None

    @property
    def even(self) -> bool:
        """Whether all ranks have the same number of units."""
        return len(set(self.local_units)) == 1

    @property
    def bases_differ(self) -> bool:
        """Whether another axis divides dim 0 unevenly, so that bases have different lengths."""
        return self.unit_length is not None

    def unit_size(self, base_shape: Sequence[int]) -> int:
        """Returns the number of elements in a unit of a base of this shape."""
        if self.unit_length is not None:
            return self.unit_length * math.prod(base_shape[len(self.dims) :])
        return math.prod(base_shape) // self.total_units

    def interval(self, base_shape: Sequence[int], rank: int) -> range:
        """Returns the elements of the flattened base that a rank of the axis has."""
        unit, numel = self.unit_size(base_shape), math.prod(base_shape)
        start, stop = self._bounds[rank] * unit, self._bounds[rank + 1] * unit
        return range(min(start, numel), min(stop, numel))

    def first_row(self, base_shape: Sequence[int], rank: int) -> int:
        """Returns the first row of a rank, where units are rows or the whole tensor."""
        assert len(self.dims) <= 1, f"{self} splits rows"
        unit = self.unit_length or base_shape[0] // self.total_units
        return min(self._bounds[rank] * unit, base_shape[0])

    def local_shape(self, base_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's local tensor, for a base of this shape."""
        if not self.dims:
            is_owner = self.local_units[rank] == 1
            return tuple(base_shape) if is_owner else (0, *base_shape[1:])
        length = math.prod(base_shape[: len(self.dims)])
        unit = self.unit_length or length // self.total_units
        start, stop = (min(bound * unit, length) for bound in self._bounds[rank : rank + 2])
        return (stop - start, *base_shape[len(self.dims) :])

    def check(self, base_shape: Sequence[int], axis_size: int) -> None:
        """Checks that the placement fits a base on an axis.

        Raises:
            ValueError: there is not one entry of `local_units` per rank, a dim does not exist, the
                number of units does not divide the sizes of the dims, or all units are shorter.
        """
        if len(self.local_units) != axis_size:
            raise ValueError(
                f"{self!r}: expected local_units= of one number for each of the {axis_size} ranks "
                f"of the mesh axis, got {len(self.local_units)}"
            )
        if len(self.dims) > len(base_shape):
            raise ValueError(
                f"{self!r}: expected dims of the tensor, whose shape is {tuple(base_shape)}, got "
                f"{self.dims}"
            )
        length = math.prod(base_shape[: len(self.dims)])
        if self.unit_length is not None:
            if length > self.total_units * self.unit_length:
                raise ValueError(
                    f"{self!r}: expected units for all {length} elements of dims {self.dims} of "
                    f"shape {tuple(base_shape)}, got {self.total_units} of {self.unit_length}"
                )
        elif length % self.total_units:
            raise ValueError(
                f"{self!r}: expected a number of units that divides {length}, the elements of dims "
                f"{self.dims} of shape {tuple(base_shape)}, got {self.total_units}; choose units "
                f"whose sum divides it, or name more dims"
            )

    def _fields(self) -> tuple[object, ...]:
        return (self.dims, self.local_units, self.unit_length)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RaggedShard) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self._fields())

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units}{self._length})"

    @property
    def _length(self) -> str:
        return "" if self.unit_length is None else f", unit_length={self.unit_length}"

    def __str__(self) -> str:
        unit = "" if self.unit_length is None else f"x{self.unit_length}"
        return f"Rg{_short(self.dims)}{_short(self.local_units)}{unit}"

    def __fx_repr__(self) -> tuple[str, dict[str, object]]:
        return repr(self), {type(self).__name__: type(self)}


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    values = tuple(values)
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise TypeError(f"RaggedShard: expected integers for {name}, got {values!r}") from None


def _short(values: tuple[int, ...]) -> str:
    return f"({','.join(map(str, values))})"
