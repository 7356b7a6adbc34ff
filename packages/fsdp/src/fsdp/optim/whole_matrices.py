"""A ``shard_placement_fn`` that places each matrix on one rank and balances the work of Muon."""

from __future__ import annotations

import math

from torch import nn

from fsdp.mesh.granularity import Balance, Whole
from fsdp.optim.muon.newton_schulz import newton_schulz_cost

__all__ = ["WholeMatrices"]


class WholeMatrices:
    """Places each matrix on one rank, so that a step of Muon does not communicate.

    The planner makes the shards of a group as small as possible. The shards of all `fully_shard`
    calls that take this object are assigned to ranks such that all ranks have equal amounts of
    Newton-Schulz iteration. Create one object per model: two models that are sharded in the same
    way then have the same placements.

    Parameters of 2 dims are matrices; those of 3 dims are stacks of matrices and are placed on one
    rank each; others may be sharded at any element. Embeddings and output layers are not for Muon:
    use another function for them::

        whole = WholeMatrices()
        for layer in model.layers:
            fully_shard(layer, shard_placement_fn=whole)
        fully_shard(model)
    """

    def __init__(self) -> None:
        self.balance = Balance()

    def __call__(self, param: nn.Parameter) -> Whole | None:
        """Returns the granularity of a parameter, for `fully_shard`."""
        if param.ndim not in (2, 3):
            return None
        *stacked, rows, columns = param.shape
        return Whole(math.prod(stacked) * newton_schulz_cost((rows, columns)), self.balance)
