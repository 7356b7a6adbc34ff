"""Computes attention of a rank's queries to one block of keys after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.dropout import DropoutMasks
from plan_api.context_parallel.kernels import AttentionOutput, TileOptions, select_kernel
from plan_api.context_parallel.online_softmax import OnlineSoftmax, accumulation_dtype
from plan_api.context_parallel.order import Positions
from plan_api.context_parallel.tiles import AttentionTile, BlockTiles, divide_causal

__all__ = ["Block", "BlockBackward", "BlockForward", "pack", "sinks_grad"]


@dataclass(frozen=True)
class Block:
    """Keys and values that a rank has now.

    Attributes:
        tensor: keys and values, one behind the other: (batch, key-value heads, keys, features of
            keys and of values).
        tiles: of this rank's queries and the keys of the block's rank.
        positions: of all keys of the block's rank.
        first: the place of the first key at hand among these.
    """

    tensor: torch.Tensor
    tiles: BlockTiles
    positions: Positions
    first: int = 0

    def local(self, tile: AttentionTile) -> AttentionTile:
        """Returns a tile with keys counted from the first at hand."""
        keys = slice(tile.keys.start - self.first, tile.keys.stop - self.first)
        return replace(tile, keys=keys)


def pack(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns keys and values in one tensor, as of `Block`."""
    return torch.cat([key, value], dim=-1)


class _BlockAttention:
    """What forward and backward share.

    Args:
        query: of this rank.
        features: of keys; those of values are behind them.
        call: the call.
        masks: of dropout; None: there is none.
    """

    def __init__(
        self, query: torch.Tensor, features: int, call: AttentionCall, masks: DropoutMasks | None
    ) -> None:
        self._query, self._features, self._masks = query, features, masks
        self._positions = call.order.parts[call.rank]
        self._kernel = select_kernel(query, call.scale, has_dropout=masks is not None)

    def tiles(self, block: Block) -> list[AttentionTile]:
        """Returns the tiles of a block, as large as the kernel takes them."""
        queries = self._kernel.causal_queries
        return [one for tile in block.tiles.tiles for one in divide_causal(tile, queries)]

    def _split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return packed[..., : self._features], packed[..., self._features :]

    def _options(self, tile: AttentionTile, block: Block) -> TileOptions:
        device, factors = self._query.device, None
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
        super().__init__(query, key.shape[-1], call, masks)
        self._merged = OnlineSoftmax(query, value.shape[-1])

    def add(self, block: Block) -> None:
        """Adds the output over the keys of a block."""
        key, value = self._split(block.tensor)
        for tile in self.tiles(block):
            options, local = self._options(tile, block), block.local(tile)
            part = self._kernel.forward(self._query, key, value, local, options)
            self._merged.add(local, part.out, part.lse)

    def result(self, sinks: torch.Tensor | None) -> AttentionOutput:
        """Returns the output over all blocks and the sinks, and the log-sum-exp."""
        if sinks is not None:
            self._merged.add_sinks(sinks)
        return AttentionOutput(*self._merged.result())


class BlockBackward(_BlockAttention):
    """Adds up the gradient of queries, block by block.

    Args:
        grad: of the output.
        query: as in forward.
        features: of keys.
        output: of forward.
        call: the call.
        masks: of dropout, as in forward; None: there is none.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        features: int,
        output: AttentionOutput,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        super().__init__(query, features, call, masks)
        self._grad, self._output = grad, output
        self.grad_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))

    def add(
        self, block: Block, grad_block: torch.Tensor, tiles: Sequence[AttentionTile] | None = None
    ) -> None:
        """Adds this rank's terms of the gradients of its queries and of a block.

        Args:
            block: as in forward.
            grad_block: of the block's shape, in the dtype of accumulation.
            tiles: the tiles of the block to compute; None: all.
        """
        key, value = self._split(block.tensor)
        grad_key, grad_value = self._split(grad_block)
        for tile in self.tiles(block) if tiles is None else tiles:
            options, local = self._options(tile, block), block.local(tile)
            part = self._kernel.backward(
                self._grad, self._query, key, value, self._output, local, options
            )
            self.grad_query[local.rows, :, local.queries] += part.query
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
