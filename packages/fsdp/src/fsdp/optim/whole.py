"""Matrices whole on one rank each, their work balanced over the ranks."""

from __future__ import annotations

import math

from torch import nn

from fsdp.balance import Balance
from fsdp.optim.muon.owners import work_of
from fsdp.policy import Whole

__all__ = ["WholeMatrices"]


class WholeMatrices:
    """A ``shard_placement_fn`` that gives each matrix to one rank, so that Muon sends nothing.

    The planner keeps the shards of a group as small as can be, and of all calls of `fully_shard`
    that are given this object the shards go to ranks such that Newton-Schulz keeps all of them
    equally busy. Make one for each model: two models that are sharded alike then lie alike.
    Parameters of 2 and 3 dims are matrices, a stack of 3 dims one owner's; others are cut anywhere.
    For embeddings and heads, which are not for Muon, use another function::

        whole = WholeMatrices()
        for layer in model.layers:
            fully_shard(layer, shard_placement_fn=whole)
        fully_shard(model)
    """

    def __init__(self) -> None:
        self.balance = Balance()

    def __call__(self, param: nn.Parameter) -> Whole | None:
        """As `fully_shard` asks."""
        if param.ndim not in (2, 3):
            return None
        *stacked, rows, columns = param.shape
        return Whole(math.prod(stacked) * work_of((rows, columns)), self.balance)
