"""A ragged shard prepared for a reduction: its empty shards filled, or its weight applied.

Internal: it is what the input of a reduction is "redistributed" to, so that the local operator, run
by torch's own dispatch, is right on every rank. Nothing is sent and no tensor stays in it.
"""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor.placement_types import Placement

from ragged_shard.ragged import RaggedShard


class ReductionInput(Placement):
    """What a ragged shard becomes before a local reduction.

    Args:
        ragged: the placement of the tensor.
        value: that replaces an empty shard, as one row; infinities become the dtype's bounds.
        weighted: shards are multiplied by their share of the tensor, so that means add up.
    """

    def __init__(self, ragged: RaggedShard, value: float, *, weighted: bool = False) -> None:
        super().__init__()
        self.ragged = ragged
        self.value = value
        self.weighted = weighted

    def prepare(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """The tensor to reduce, of a rank's local tensor.

        Args:
            local: of the ragged placement's local shape.
            rank: index on the axis.

        Returns:
            The same tensor, or its product with its weight, or one row of the value.
        """
        units = self.ragged.local_units[rank]
        if units == 0:
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
