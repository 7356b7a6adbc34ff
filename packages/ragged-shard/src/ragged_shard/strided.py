"""StridedRaggedShard: the ragged placement of an axis whose inner axes shard dim 0 too."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from ragged_shard.ragged import RaggedShard, _short


class StridedRaggedShard(RaggedShard):
    """What the FSDP axis carries where an inner axis (TP, EP) shards dim 0.

    On a mesh ``(fsdp, tp)`` a weight that tensor parallelism shards on dim 0 and FSDP then cuts
    into ragged pieces is placed as ``(StridedRaggedShard(dims, units, split_factor=tp),
    Shard(0))``: left to right that reads as if the ragged cut came first, and ``split_factor`` says
    that it came last, after dim 0 had been cut into so many pieces (as torch's ``_StridedShard``
    says it of a Shard). The ranks hold what `RaggedShard` gives them of the base; the factor is
    checked against the mesh. As of `RaggedShard`, the first one calls `ragged_shard.install`.

    Args:
        dims: as of `RaggedShard`.
        local_units: as of `RaggedShard`, of the local tensor of the inner axes.
        split_factor: into how many pieces the inner axes cut dim 0: the product of their sizes.

    Raises:
        ValueError: as `RaggedShard`; a split factor below one.
    """

    split_factor: int

    def __init__(self, dims: Iterable[int], local_units: Iterable[int], split_factor: int) -> None:
        try:
            split_factor = operator.index(split_factor)
        except TypeError:
            raise TypeError(
                f"StridedRaggedShard: expected an integer for split_factor, got {split_factor!r}"
            ) from None
        if split_factor < 1:
            raise ValueError(
                f"StridedRaggedShard: split_factor must be at least 1, got {split_factor}"
            )
        self.split_factor = split_factor
        super().__init__(dims, local_units)

    def with_units(self, dims: Iterable[int], local_units: Iterable[int]) -> StridedRaggedShard:
        """A placement of the same kind with other dims and units."""
        return StridedRaggedShard(dims, local_units, self.split_factor)

    def _fields(self) -> tuple[object, ...]:
        return (self.dims, self.local_units, self.split_factor)

    def __repr__(self) -> str:
        return (
            f"StridedRaggedShard(dims={self.dims}, local_units={self.local_units}, "
            f"split_factor={self.split_factor})"
        )

    def __str__(self) -> str:
        return f"SRg{_short(self.dims)}{_short(self.local_units)}/{self.split_factor}"
