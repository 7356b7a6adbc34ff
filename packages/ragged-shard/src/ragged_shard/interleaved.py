"""InterleavedShard: shards each of several equal chunks of a dim, in units of rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement

from ragged_shard.patch_points import ensure_installed


class InterleavedShard(Placement):
    """Shards each of ``interleaves`` equal chunks of a dim over the axis.

    With tensor parallelism a fused QKV weight of ``3 * h`` rows is placed as
    ``InterleavedShard(0, 3)``: the dim is viewed as ``(3, h)`` and ``h`` is sharded as by
    `torch.chunk`; a local tensor has the rank's rows of Q, then of K, then of V. Flattening two
    dims of which the second is sharded has the same result. (veScale, appendix 12.) As with
    `RaggedShard`, the first construction calls `ragged_shard.install`.

    With ``unit`` rows of a chunk are sharded in units that are never split, `torch.chunk` being
    applied to the units: of 3 heads of 4 rows, ``InterleavedShard(0, 1, unit=4)`` gives two ranks 8
    and 4 rows, where ``Shard(0)`` gives each 6.

    Args:
        dim: of the tensor; a negative one counts from the last and is made positive when a tensor
            is placed.
        interleaves: the number of chunks, at least 1; it must divide the dim's size.
        unit: the size of a unit, at least 1; it must divide the size of a chunk.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: there is less than one chunk, or a unit is smaller than 1.
    """

    dim: int
    interleaves: int
    unit: int

    def __init__(self, dim: int, interleaves: int, unit: int = 1) -> None:
        super().__init__()
        ensure_installed()
        self.dim = _integer("dim", dim)
        self.interleaves = _integer("interleaves", interleaves)
        self.unit = _integer("unit", unit)
        for name, value in (("interleaves", self.interleaves), ("unit", self.unit)):
            if value < 1:
                raise ValueError(f"InterleavedShard: expected {name} >= 1, got {value}")

    @property
    def equals_shard(self) -> bool:
        """Whether local tensors are those of a Shard of the dim."""
        return self.interleaves == 1 and self.unit == 1

    def normalized(self, ndim: int) -> InterleavedShard:
        """Returns the same placement with a positive dim, for a tensor of `ndim` dims."""
        return self if self.dim >= 0 else self.with_dim(self.dim + ndim)

    def with_dim(self, dim: int, interleaves: int | None = None) -> InterleavedShard:
        """Returns a placement with the same units of another dim.

        Args:
            dim: of the tensor.
            interleaves: the number of chunks; None: the same.
        """
        return InterleavedShard(dim, interleaves or self.interleaves, self.unit)

    def chunk(self, shape: Sequence[int]) -> int:
        """Returns the size of one chunk of the dim, for a base of this shape."""
        return shape[self.dim] // self.interleaves

    def piece(self, shape: Sequence[int], axis_size: int, rank: int) -> range:
        """Returns the indices within each chunk that a rank of the axis has."""
        chunk = self.chunk(shape)
        size = -(-chunk // (axis_size * self.unit)) * self.unit
        start = min(size * rank, chunk)
        return range(start, min(start + size, chunk))

    def local_shape(self, base_shape: Sequence[int], axis_size: int, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's local tensor, for a base of this shape."""
        shape = list(base_shape)
        shape[self.dim] = self.interleaves * len(self.piece(base_shape, axis_size, rank))
        return tuple(shape)

    def check(self, base_shape: Sequence[int]) -> None:
        """Checks that the placement fits a base.

        Raises:
            ValueError: the dim does not exist, the number of chunks does not divide its size, or a
                chunk consists of no whole units.
        """
        if not 0 <= self.dim < len(base_shape):
            raise ValueError(
                f"{self!r}: expected a dim of the tensor, whose shape is {tuple(base_shape)}, got "
                f"{self.dim}"
            )
        if base_shape[self.dim] % self.interleaves:
            raise ValueError(
                f"{self!r}: expected a number of chunks that divides {base_shape[self.dim]}, the "
                f"size of dim {self.dim}, got {self.interleaves}"
            )
        if self.chunk(base_shape) % self.unit:
            raise ValueError(
                f"{self!r}: expected a unit that divides {self.chunk(base_shape)}, the size of a "
                f"chunk of dim {self.dim}, got {self.unit}"
            )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, InterleavedShard)
            and (self.dim, self.interleaves, self.unit)
            == (other.dim, other.interleaves, other.unit)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(("InterleavedShard", self.dim, self.interleaves, self.unit))

    def __reduce__(self) -> tuple[object, ...]:
        return (InterleavedShard, (self.dim, self.interleaves, self.unit))

    def __repr__(self) -> str:
        unit = "" if self.unit == 1 else f", unit={self.unit}"
        return f"InterleavedShard(dim={self.dim}, interleaves={self.interleaves}{unit})"

    def __str__(self) -> str:
        unit = "" if self.unit == 1 else f"x{self.unit}"
        return f"IS({self.dim},{self.interleaves}{unit})"

    def __fx_repr__(self) -> tuple[str, dict[str, object]]:
        return repr(self), {"InterleavedShard": InterleavedShard}


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"InterleavedShard: expected an integer for {name}, got {value!r}"
        ) from None
