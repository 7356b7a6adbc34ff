"""Computes attention of a rank's queries to one block of keys after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.dropout import DropoutMasks
from plan_api.context_parallel.kernels import (
    AttentionKernel,
    AttentionOutput,
    TileOptions,
    select_block_kernel,
    select_kernel,
)
from plan_api.context_parallel.online_softmax import OnlineSoftmax, accumulation_dtype
from plan_api.context_parallel.order import Positions
from plan_api.context_parallel.tiles import (
    AttentionTile,
    BlockTiles,
    SeenQueries,
    divide_causal,
)

__all__ = ["Block", "BlockBackward", "BlockForward", "pack", "sinks_grad"]


@dataclass(frozen=True)
class Block:
    """Keys and values that a rank has now.

    Attributes:
        key: (batch, key-value heads, keys, features).
        value: as the keys; it may have other features.
        tiles: of this rank's queries and the keys of the block's rank.
        positions: of all keys of the block's rank.
        first: the place of the first key at hand among these.
    """

    key: torch.Tensor
    value: torch.Tensor
    tiles: BlockTiles
    positions: Positions
    first: int = 0

    def local(self, tile: AttentionTile) -> AttentionTile:
        """Returns a tile with keys counted from the first at hand."""
        keys = slice(tile.keys.start - self.first, tile.keys.stop - self.first)
        return replace(tile, keys=keys)


def pack(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns keys and values in one tensor, whose last dim has the features of both."""
    return torch.cat([key, value], dim=-1)


class _BlockAttention:
    """What forward and backward share.

    Args:
        query: of this rank.
        key_heads: the number of key-value heads.
        call: the call.
        masks: of dropout; None: there is none.
    """

    def __init__(
        self, query: torch.Tensor, key_heads: int, call: AttentionCall, masks: DropoutMasks | None
    ) -> None:
        self._groups = (key_heads, query.shape[1] // key_heads)
        self._query, self._masks = query.unflatten(1, self._groups), masks
        self._positions = call.order.parts[call.rank]
        has_dropout = masks is not None
        self._kernel = select_kernel(self._query, call.scale, has_dropout=has_dropout)
        self._of_blocks = select_block_kernel(self._query, call.scale, has_dropout=has_dropout)

    def tiles(self, block: Block) -> list[AttentionTile]:
        """Returns the tiles of a block, as large as the kernel takes them."""
        if self._of_blocks is not None and not block.tiles.is_causal:
            whole = block.tiles.whole()
            return [] if whole is None else [whole]
        sizes = self._kernel.causal_queries, self._kernel.causal_strip
        return [one for tile in block.tiles.tiles for one in divide_causal(tile, *sizes)]

    def _kernel_of(self, tile: AttentionTile) -> AttentionKernel:
        return self._of_blocks if self._of_blocks and tile.kind == "block" else self._kernel

    def _options(self, tile: AttentionTile, block: Block) -> TileOptions:
        device, factors = self._query.device, None
        if tile.kind == "block":
            return TileOptions(pairs=block.tiles.block_pairs(tile.keys, device))
        if self._masks is not None:
            dtype = accumulation_dtype(self._query.dtype)
            factors = self._masks.factors(tile, self._positions, block.positions, dtype)
        mask = block.tiles.mask(tile, device) if tile.kind == "masked" else None
        return TileOptions(tile.kind == "causal", mask, factors)


class BlockForward(_BlockAttention):
    """Adds up the output, block by block."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        super().__init__(query, key.shape[1], call, masks)
        self._merged = OnlineSoftmax(self._query, value.shape[-1])

    def add(self, block: Block) -> None:
        """Adds the output over the keys of a block."""
        for tile in self.tiles(block):
            options, local = self._options(tile, block), block.local(tile)
            part = self._kernel_of(tile).forward(
                self._query, block.key, block.value, local, options
            )
            self._merged.add(local, part.out, part.lse)

    def result(self, sinks: torch.Tensor | None) -> AttentionOutput:
        """Returns the output over all blocks and the sinks, and the log-sum-exp."""
        if sinks is not None:
            self._merged.add_sinks(sinks.unflatten(0, self._groups))
        out, lse = self._merged.result()
        return AttentionOutput(out.flatten(1, 2), lse.flatten(1, 2))


class BlockBackward(_BlockAttention):
    """Adds up the gradient of queries, block by block.

    Args:
        grad: of the output.
        query: as in forward.
        key_heads: the number of key-value heads.
        output: of forward.
        call: the call.
        masks: of dropout, as in forward; None: there is none.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key_heads: int,
        output: AttentionOutput,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        super().__init__(query, key_heads, call, masks)
        self._grad = grad.unflatten(1, self._groups)
        self._output = AttentionOutput(
            output.out.unflatten(1, self._groups), output.lse.unflatten(1, self._groups)
        )
        self.grad_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
        self._grad_query, self._seen = (
            self.grad_query.unflatten(1, self._groups),
            SeenQueries(query.shape[0], query.shape[2]),
        )

    def add(
        self,
        block: Block,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
        tiles: Sequence[AttentionTile] | None = None,
    ) -> None:
        """Adds this rank's terms of the gradients of its queries and of a block.

        Args:
            block: as in forward.
            grad_key: of the block's keys, in the dtype of accumulation.
            grad_value: of the block's values, so too.
            tiles: the tiles of the block to compute; None: all.
        """
        for tile in self.tiles(block) if tiles is None else tiles:
            options, local = self._options(tile, block), block.local(tile)
            part = self._kernel_of(tile).backward(
                self._grad, self._query, block.key, block.value, self._output, local, options
            )
            grad_query = self._grad_query[local.rows, :, :, local.queries]
            if self._seen.add(tile):
                grad_query += part.query
            else:
                grad_query.copy_(part.query)
            grad_key[local.rows, :, local.keys] += part.key
            grad_value[local.rows, :, local.keys] += part.value


def sinks_grad(
    grad: torch.Tensor, output: AttentionOutput, sinks: torch.Tensor | None
) -> torch.Tensor | None:
    """Returns this rank's term of the gradient of sinks: the sum over its queries."""
    if sinks is None:
        return None
    dtype = output.lse.dtype
    weights = (sinks.to(dtype)[:, None] - output.lse).exp()
    delta = (grad.to(dtype) * output.out.to(dtype)).sum(-1)
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)
