"""One call of attention over a sharded sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from plan_api.context_parallel.dropout import AttentionDropout
from plan_api.context_parallel.mask import AttentionMask
from plan_api.context_parallel.order import TokenOrder
from plan_api.context_parallel.tiles import BlockTiles, block_tiles
from plan_api.runtime.error_context import StepContext

__all__ = ["AttentionCall"]


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention, on local tensors of (batch, heads, sequence, features).

    Attributes:
        mesh: the plan's mesh.
        axis: the mesh axis that shards the sequence, by number; None: the ranks have all of it.
        order: of the sequence of queries.
        mask: which keys each query attends to.
        scale: of products before the softmax; None: by the root of the number of features.
        where: the module, for messages.
        backward_context: the step of the plan, for errors in backward; None: there is no plan.
        key_order: of the sequence of keys; None: that of the queries.
        ulysses_axis: the mesh axis that shards the parts of ``axis`` again, in their order, for
            which heads are sharded instead; None: there is none.
        dropout: of attention weights; None: without.
    """

    mesh: DeviceMesh
    axis: int | None
    order: TokenOrder
    mask: AttentionMask
    scale: float | None
    where: str
    backward_context: StepContext | None = None
    key_order: TokenOrder | None = None
    ulysses_axis: int | None = None
    dropout: AttentionDropout | None = None

    @property
    def rank(self) -> int:
        """This rank's coordinate along the axis."""
        return 0 if self.axis is None else self.mesh.get_local_rank(self.axis)

    @property
    def ranks(self) -> int:
        """The number of ranks along the axis."""
        return 1 if self.axis is None else self.mesh.size(self.axis)

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks along the axis."""
        assert self.axis is not None
        return self.mesh.get_group(self.axis)

    @property
    def keys(self) -> TokenOrder:
        """The order of the sequence of keys."""
        return self.key_order or self.order

    def block(self, rank: int, source: int) -> BlockTiles:
        """Returns the tiles of the queries of one rank and the keys of another."""
        order, keys = self.order, self.keys
        return block_tiles(
            self.mask, order.parts[rank], keys.parts[source], order.length, keys.length
        )

    def block_of_all(self) -> BlockTiles:
        """Returns the tiles of this rank's queries and all keys, which are in sequence order."""
        order, keys = self.order, self.keys
        every = ((0, keys.padded_length),)
        return block_tiles(self.mask, order.parts[self.rank], every, order.length, keys.length)

    def check(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Checks that tensors have this call's numbers of tokens.

        Args:
            query: of this rank.
            key: of this rank.

        Raises:
            ValueError: they have others, or the mask is of another sequence.
        """
        for what, tensor, order in (("queries", query, self.order), ("keys", key, self.keys)):
            if tensor.shape[2] != order.local_length:
                raise ValueError(
                    f"{self.where}: expected {order.local_length} {what} on this rank, the part "
                    f"of a sequence of {order.length}, got {tensor.shape[2]}"
                )
        if self.order.length == self.keys.length:
            self.mask.check(self.order.length, query.shape[0], self.where)
        elif self.mask != AttentionMask():
            raise ValueError(
                f"{self.where}: expected as many queries as keys in attention with a mask, as in "
                f"training, got {self.order.length} queries and {self.keys.length} keys"
            )
