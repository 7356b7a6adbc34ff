"""The placement of a ragged shard before a local reduction: empty shards filled, or weighted.

Internal: the input of a reduction is "redistributed" to it, so that torch's dispatch calls the
local operator on a correct tensor on every rank. Nothing is sent; no DTensor has this placement.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.ragged import RaggedShard


class ReductionInput(Placement):
    """The placement of a ragged shard before a local reduction.

    Args:
        ragged: the placement of the tensor.
        value: of the row that replaces an empty shard; infinities become the dtype's bounds.
        weighted: whether shards are multiplied by their share of the tensor, for means.
    """

    def __init__(self, ragged: RaggedShard, value: float, *, weighted: bool = False) -> None:
        super().__init__()
        self.ragged = ragged
        self.value = value
        self.weighted = weighted

    def prepare(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """Returns the tensor to reduce on a rank, given its local tensor.

        Args:
            local: of the ragged placement's local shape.
            rank: index on the axis.

        Returns:
            the same tensor, its product with the weight, or one row of the value.
        """
        units = self.ragged.local_units[rank]
        if units == 0 or (self.ragged.bases_differ and local.shape[0] == 0):
            return local.new_full((1, *local.shape[1:]), self._fill(local.dtype))
        if self.weighted:
            return local * (units / self.ragged.total_units)
        return local

    def _fill(self, dtype: torch.dtype) -> float | int:
        if math.isfinite(self.value) or dtype.is_floating_point:
            return self.value
        if dtype is torch.bool:
            return self.value > 0
        bounds = torch.iinfo(dtype)
        return bounds.max if self.value > 0 else bounds.min

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ReductionInput)
            and (self.ragged, self.value, self.weighted)
            == (other.ragged, other.value, other.weighted)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.ragged, self.value, self.weighted))

    def __repr__(self) -> str:
        return f"ReductionInput({self.ragged!r}, {self.value}, weighted={self.weighted})"
