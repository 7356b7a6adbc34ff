"""InterleavedShard: shards each of several equal chunks of a dim."""

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

    Args:
        dim: of the tensor; a negative one counts from the last and is made positive when a tensor
            is placed.
        interleaves: the number of chunks, at least 1; it must divide the dim's size.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: there is less than one chunk.
    """

    dim: int
    interleaves: int

    def __init__(self, dim: int, interleaves: int) -> None:
        super().__init__()
        ensure_installed()
        self.dim = _integer("dim", dim)
        self.interleaves = _integer("interleaves", interleaves)
        if self.interleaves < 1:
            raise ValueError(f"InterleavedShard: expected interleaves >= 1, got {interleaves}")

    def normalized(self, ndim: int) -> InterleavedShard:
        """Returns the same placement with a positive dim, for a tensor of `ndim` dims."""
        return self if self.dim >= 0 else InterleavedShard(self.dim + ndim, self.interleaves)

    def chunk(self, shape: Sequence[int]) -> int:
        """Returns the size of one chunk of the dim, for a base of this shape."""
        return shape[self.dim] // self.interleaves

    def piece(self, shape: Sequence[int], axis_size: int, rank: int) -> range:
        """Returns the indices within each chunk that a rank of the axis has."""
        chunk = self.chunk(shape)
        size = -(-chunk // axis_size)
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
            ValueError: the dim does not exist, or the number of chunks does not divide its size.
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

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, InterleavedShard)
            and (self.dim, self.interleaves) == (other.dim, other.interleaves)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(("InterleavedShard", self.dim, self.interleaves))

    def __reduce__(self) -> tuple[object, ...]:
        return (InterleavedShard, (self.dim, self.interleaves))

    def __repr__(self) -> str:
        return f"InterleavedShard(dim={self.dim}, interleaves={self.interleaves})"

    def __str__(self) -> str:
        return f"IS({self.dim},{self.interleaves})"

    def __fx_repr__(self) -> tuple[str, dict[str, object]]:
        return repr(self), {"InterleavedShard": InterleavedShard}


def _integer(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"InterleavedShard: expected an integer for {name}, got {value!r}"
        ) from None
