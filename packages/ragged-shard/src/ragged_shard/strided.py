"""StridedRaggedShard: the ragged placement of an axis whose inner axes shard dim 0 too."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ragged_shard.ragged import RaggedShard


class StridedRaggedShard(RaggedShard):
    """The placement on the FSDP axis of a tensor whose dim 0 an inner axis (TP, EP) shards too.

    On a mesh ``(fsdp, tp)`` a weight that tensor parallelism shards on dim 0, and FSDP then shards
    raggedly, is placed as ``(StridedRaggedShard(dims, units, split_factor=tp), Shard(0))``. DTensor
    reads placements from left to right, as if the ragged axis were applied first; ``split_factor``
    declares that it is applied last, after the inner axes have divided dim 0 into that many shards,
    as torch's ``_StridedShard`` does for a Shard. Local tensors are those of `RaggedShard` with the
    same base; the factor is checked against the mesh. As with `RaggedShard`, the first construction
    calls `ragged_shard.install`.

    Args:
        dims: as of `RaggedShard`.
        local_units: as of `RaggedShard`, of the local tensor of the inner axes.
        split_factor: the number of shards of dim 0 on the inner axes: the product of their sizes.
        unit_length: as of `RaggedShard`, where the inner axes divide dim 0 unevenly.

    Raises:
        TypeError: as `RaggedShard`.
        ValueError: as `RaggedShard`; the split factor is below one.
    """

    split_factor: int

    def __init__(
        self,
        dims: Iterable[int],
        local_units: Iterable[int],
        split_factor: int,
        unit_length: int | None = None,
    ) -> None:
        try:
            split_factor = operator.index(split_factor)
        except TypeError:
            raise TypeError(
                f"StridedRaggedShard: expected an integer for split_factor, got {split_factor!r}"
            ) from None
        if split_factor < 1:
            raise ValueError(f"StridedRaggedShard: expected split_factor >= 1, got {split_factor}")
        self.split_factor = split_factor
        super().__init__(dims, local_units, unit_length)

    def with_units(
        self, dims: Iterable[int], local_units: Iterable[int], unit_length: int | None = None
    ) -> StridedRaggedShard:
        """Returns a placement of the same class with other dims and units."""
        return StridedRaggedShard(dims, local_units, self.split_factor, unit_length)

    def _fields(self) -> tuple[object, ...]:
        return (self.dims, self.local_units, self.split_factor, self.unit_length)

    def __repr__(self) -> str:
        return (
            f"StridedRaggedShard(dims={self.dims}, local_units={self.local_units}, "
            f"split_factor={self.split_factor}{self._length})"
        )

    def __str__(self) -> str:
        return f"S{super().__str__()}/{self.split_factor}"
