"""RaggedShard: each rank of a mesh axis holds its own number of equal units of a tensor.

Note: the words of this package.
    axis: of a mesh. dim: of a tensor.
    unit: the atom of a ragged shard. The leading dims of a tensor are flattened and cut into equal
        units; a rank holds some of them, contiguous in storage, in rank order.
    base: what a rank would hold if the ragged axis replicated, that is the local tensor of the
        other axes' placements. A ragged placement is always applied last, to the flat base,
        whatever its axis's place in the mesh; so units are units of the base.
    held piece: a box of the base, and where a rank stores it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch.distributed.tensor.placement_types import Placement

from ragged_shard.patch_points import ensure_installed


class RaggedShard(Placement):
    """Rank i of the axis holds ``local_units[i]`` of ``sum(local_units)`` equal units.

    The units partition the flattened leading dims ``dims``: ``(0,)`` keeps rows whole; every
    leading dim named means that elements are the units' measure; ``()`` makes the whole tensor one
    unit, which one rank owns. The tensor must be contiguous.

    The local tensor has one dim for all of ``dims``, then the remaining dims, which are whole: a
    tensor of shape ``(a, b, c)`` has local tensors ``(n, b, c)`` under ``dims=(0,)`` and ``(n, c)``
    under ``dims=(0, 1)``. Under ``()`` the owner has the tensor's own shape, and the others the
    same with a first size of 0. (veScale-FSDP, section 4.)

    The first placement that is constructed calls `ragged_shard.install`, which patches torch.

    Args:
        dims: the leading dims that are cut, ``(0, 1, ..., k)``, or ``()``; anything with
            ``__index__`` is an integer, here and in ``local_units``.
        local_units: units per rank of the axis, zeros allowed; their sum must divide the product
            of the sizes of ``dims``.

    Raises:
        ValueError: dims that are no leading prefix, units that are negative or all zero.
        TypeError: dims or units that are no integers.

    Example:
        >>> from torch.distributed.tensor import distribute_tensor
        >>> distribute_tensor(weight, mesh, [RaggedShard((0,), (3, 5))])   # 3/8 and 5/8 of the rows
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: Iterable[int], local_units: Iterable[int]) -> None:
        super().__init__()
        ensure_installed()
        self.dims = _integers("dims", dims)
        self.local_units = _integers("local_units", local_units)
        if self.dims != tuple(range(len(self.dims))):
            raise ValueError(
                f"RaggedShard: dims must be the leading dims in order, (0, 1, ..., k) or (); "
                f"got {self.dims}"
            )
        if not self.local_units or min(self.local_units) < 0:
            raise ValueError(
                f"RaggedShard: local_units must be one non-negative integer per rank of the axis; "
                f"got {self.local_units}"
            )
        if sum(self.local_units) == 0:
            raise ValueError(
                f"RaggedShard: local_units {self.local_units} give no rank anything; at least one "
                f"must be positive"
            )
        if not self.dims and sum(self.local_units) != 1:
            raise ValueError(
                f"RaggedShard: dims=() makes the whole tensor one unit, so exactly one rank holds "
                f"1 and the others 0; got local_units={self.local_units}"
            )
        self._bounds = (0, *accumulate(self.local_units))
        self._key = (type(self).__name__, *self._fields())
        self._hash = hash(self._key)

    @classmethod
    def owned_by(cls, owner: int, world_size: int) -> RaggedShard:
        """The placement under which one rank of the axis holds the whole tensor.

        Args:
            owner: index of the rank on the axis.
            world_size: size of the axis.

        Raises:
            ValueError: an owner that is not on the axis.
        """
        if not 0 <= owner < world_size:
            raise ValueError(
                f"RaggedShard: owner {owner} is outside an axis of {world_size} ranks; it must be "
                f"0 to {world_size - 1}"
            )
        return RaggedShard((), (int(rank == owner) for rank in range(world_size)))

    def with_units(self, dims: Iterable[int], local_units: Iterable[int]) -> RaggedShard:
        """A placement of the same kind with other dims and units."""
        return RaggedShard(dims, local_units)

    @property
    def total_units(self) -> int:
        """Units of the whole axis."""
        return self._bounds[-1]

    @property
    def owner(self) -> int | None:
        """The only rank that holds anything, or None where several do."""
        holders = [rank for rank, units in enumerate(self.local_units) if units]
        return holders[0] if len(holders) == 1 else None

    @property
    def even(self) -> bool:
        """Whether every rank holds the same number of units."""
        return len(set(self.local_units)) == 1

    def unit_size(self, base_shape: Sequence[int]) -> int:
        """Elements in a unit of a base of this shape."""
        return math.prod(base_shape) // self.total_units

    def interval(self, base_shape: Sequence[int], rank: int) -> range:
        """The flat elements of the base that a rank of the axis holds."""
        unit = self.unit_size(base_shape)
        return range(self._bounds[rank] * unit, self._bounds[rank + 1] * unit)

    def first_row(self, base_shape: Sequence[int], rank: int) -> int:
        """The index of the first row of a rank, where units are rows or the whole tensor."""
        assert len(self.dims) <= 1, f"{self} cuts rows"
        return self._bounds[rank] * (base_shape[0] // self.total_units)

    def local_shape(self, base_shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor, for a base of this shape."""
        if not self.dims:
            mine = self.local_units[rank] == 1
            if mine:
                return tuple(base_shape)
            return (0, *base_shape[1:])
        cut = math.prod(base_shape[: len(self.dims)]) // self.total_units
        return (self.local_units[rank] * cut, *base_shape[len(self.dims) :])

    def check(self, base_shape: Sequence[int], axis_size: int) -> None:
        """Raises where the placement does not fit a base on an axis.

        Raises:
            ValueError: as many units as the axis has ranks are wanted; the dims exist; their sizes
                are divisible by the number of units.
        """
        if len(self.local_units) != axis_size:
            raise ValueError(
                f"{self!r}: local_units has {len(self.local_units)} entries for a mesh axis of "
                f"{axis_size} ranks; give one per rank"
            )
        if len(self.dims) > len(base_shape):
            raise ValueError(
                f"{self!r}: dims {self.dims} do not exist in a tensor of shape {tuple(base_shape)}"
            )
        length = math.prod(base_shape[: len(self.dims)])
        if length % self.total_units:
            raise ValueError(
                f"{self!r}: {self.total_units} units do not divide the {length} elements of dims "
                f"{self.dims} of shape {tuple(base_shape)}; choose units whose sum divides it, or "
                f"name more dims"
            )

    def _fields(self) -> tuple[object, ...]:
        return (self.dims, self.local_units)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, RaggedShard) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self._fields())

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"

    def __str__(self) -> str:
        return f"Rg{_short(self.dims)}{_short(self.local_units)}"

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
