"""InterleavedShard: a dim made of several chunks, each of which is sharded on its own."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch.distributed.tensor.placement_types import Placement

from ragged_shard.patch_points import ensure_installed


class InterleavedShard(Placement):
    """Each rank of the axis holds its shard of every one of ``interleaves`` chunks of a dim.

    A fused QKV weight of ``3 * h`` rows is tensor-parallel as ``InterleavedShard(0, 3)``: the dim
    is read as ``(3, h)`` and ``h`` is sharded as by `torch.chunk`; a local tensor is the rank's
    rows of Q, then of K, then of V. Flattening a dim that is sharded behind another gives the same.
    (veScale, appendix 12.) As of `RaggedShard`, the first one calls `ragged_shard.install`.

    Args:
        dim: of the tensor; negative counts from the end and is made positive when a tensor is
            placed.
        interleaves: number of chunks, at least 1; must divide the dim's size.

    Raises:
        TypeError: arguments that are no integers.
        ValueError: fewer than one chunk.
    """

    dim: int
    interleaves: int

    def __init__(self, dim: int, interleaves: int) -> None:
        super().__init__()
        ensure_installed()
        self.dim = _integer("dim", dim)
        self.interleaves = _integer("interleaves", interleaves)
        if self.interleaves < 1:
            raise ValueError(f"InterleavedShard: interleaves must be at least 1, got {interleaves}")

    def normalized(self, ndim: int) -> InterleavedShard:
        """The same with a positive dim, for a tensor of so many dims."""
        return self if self.dim >= 0 else InterleavedShard(self.dim + ndim, self.interleaves)

    def chunk(self, shape: Sequence[int]) -> int:
        """Size of one chunk of the dim, for a base of this shape."""
        return shape[self.dim] // self.interleaves

    def piece(self, shape: Sequence[int], axis_size: int, rank: int) -> range:
        """The part of every chunk that a rank of the axis holds."""
        chunk = self.chunk(shape)
        size = -(-chunk // axis_size)
        start = min(size * rank, chunk)
        return range(start, min(start + size, chunk))

    def local_shape(self, base_shape: Sequence[int], axis_size: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's local tensor, for a base of this shape."""
        shape = list(base_shape)
        shape[self.dim] = self.interleaves * len(self.piece(base_shape, axis_size, rank))
        return tuple(shape)

    def check(self, base_shape: Sequence[int]) -> None:
        """Raises where the placement does not fit a base.

        Raises:
            ValueError: the dim does not exist, or is not made of so many chunks.
        """
        if not 0 <= self.dim < len(base_shape):
            raise ValueError(
                f"{self!r}: dim {self.dim} does not exist in a tensor of shape {tuple(base_shape)}"
            )
        if base_shape[self.dim] % self.interleaves:
            raise ValueError(
                f"{self!r}: dim {self.dim} of size {base_shape[self.dim]} is not made of "
                f"{self.interleaves} equal chunks"
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
