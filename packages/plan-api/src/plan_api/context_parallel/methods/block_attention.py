"""Computes attention of a rank's queries to one block of keys after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

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
)

__all__ = ["Block", "BlockBackward", "BlockForward", "CallKernels", "pack", "sinks_grad"]


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


@dataclass(frozen=True)
class CallKernels:
    """The kernels of a call, which have the same rows.

    Attributes:
        of_tiles: computes tiles.
        of_blocks: computes blocks that are neither causal nor full; None: they are divided.
        groups: the number of key-value heads, and of query heads of each.
    """

    of_tiles: AttentionKernel
    of_blocks: AttentionKernel | None
    groups: tuple[int, int]

    @classmethod
    def select(
        cls, query: torch.Tensor, key: torch.Tensor, call: AttentionCall, *, has_dropout: bool
    ) -> CallKernels:
        """Selects them for queries and keys of this rank."""
        groups = (key.shape[1], query.shape[1] // key.shape[1])
        grouped = query.unflatten(1, groups)
        of_tiles = select_kernel(grouped, call.scale, has_dropout=has_dropout)
        of_blocks = select_block_kernel(grouped, call.scale, has_dropout=has_dropout)
        assert of_blocks is None or of_blocks.rows == of_tiles.rows
        return cls(of_tiles, of_blocks, groups)

    def of(self, tile: AttentionTile) -> AttentionKernel:
        """Returns the kernel of a tile."""
        return self.of_blocks if self.of_blocks and tile.kind == "block" else self.of_tiles

    def tiles(self, block: BlockTiles) -> tuple[AttentionTile, ...]:
        """Returns the tiles of a block, as large as the kernel takes them."""
        if self.of_blocks is not None and not block.is_causal:
            whole = block.whole()
            return () if whole is None else (whole,)
        return _divided(block, type(self.of_tiles))


@lru_cache(maxsize=1024)
def _divided(block: BlockTiles, kernel: type[AttentionKernel]) -> tuple[AttentionTile, ...]:
    return kernel.divide(block.tiles)


class _BlockAttention:
    """What forward and backward share.

    Args:
        query: the rows of this rank's queries.
        kernels: of the call.
        call: the call.
        masks: of dropout; None: there is none.
    """

    def __init__(
        self,
        query: torch.Tensor,
        kernels: CallKernels,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        self.query, self.kernels, self._masks = query, kernels, masks
        self._positions = call.order.parts[call.rank]

    def tiles(self, block: Block) -> tuple[AttentionTile, ...]:
        """Returns the tiles of a block, as large as the kernel takes them."""
        return self.kernels.tiles(block.tiles)

    def _options(self, tile: AttentionTile, block: Block) -> TileOptions:
        device, factors = self.query.device, None
        if tile.kind == "block":
            return TileOptions(pairs=block.tiles.block_pairs(tile.keys, device))
        if self._masks is not None:
            dtype = accumulation_dtype(self.query.dtype)
            factors = self._masks.factors(tile, self._positions, block.positions, dtype)
        mask = block.tiles.mask(tile, device) if tile.kind == "masked" else None
        return TileOptions(tile.kind == "causal", mask, factors)


class BlockForward(_BlockAttention):
    """Adds up the output, block by block.

    Args:
        query: of this rank, (batch, heads, queries, features).
        key: of this rank.
        value: of this rank.
        call: the call.
        masks: of dropout; None: there is none.

    Attributes:
        query: the rows of the queries.
        kernels: of the call.
    """

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        kernels = CallKernels.select(query, key, call, has_dropout=masks is not None)
        super().__init__(kernels.of_tiles.join(query), kernels, call, masks)
        self._merged = OnlineSoftmax(query.unflatten(1, kernels.groups), value.shape[-1])

    def add(self, block: Block) -> None:
        """Adds the output over the keys of a block."""
        for tile in self.tiles(block):
            options, local = self._options(tile, block), block.local(tile)
            part = self.kernels.of(tile).forward(self.query, block.key, block.value, local, options)
            self._merged.add(local, part.out, part.lse)

    def result(self, sinks: torch.Tensor | None) -> AttentionOutput:
        """Returns the output over all blocks and the sinks, and the log-sum-exp."""
        if sinks is not None:
            self._merged.add_sinks(sinks.unflatten(0, self.kernels.groups))
        out, lse = self._merged.result()
        return AttentionOutput(out.flatten(1, 2), lse.flatten(1, 2))


class BlockBackward(_BlockAttention):
    """Adds up the gradient of queries, block by block.

    Args:
        grad: of the output, (batch, heads, queries, features).
        query: the rows of forward.
        output: of forward, (batch, heads, queries, ...).
        kernels: of forward.
        call: the call.
        masks: of dropout, as in forward; None: there is none.
    """

    def __init__(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        output: AttentionOutput,
        kernels: CallKernels,
        call: AttentionCall,
        masks: DropoutMasks | None,
    ) -> None:
        super().__init__(query, kernels, call, masks)
        self._grad, out, lse = map(kernels.of_tiles.join, (grad, output.out, output.lse))
        self._output = AttentionOutput(out, lse)
        shape, dtype = (*grad.shape[:-1], query.shape[-1]), accumulation_dtype(query.dtype)
        self.grad_query = torch.zeros(shape, dtype=dtype, device=query.device)
        self._grad_query = self.grad_query.unflatten(1, kernels.groups)
        self._seen = SeenQueries(grad.shape[0], grad.shape[2])

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
            part = self.kernels.of(tile).backward(
                self._grad, self.query, block.key, block.value, self._output, local, options
            )
            grad_query = local.of_queries(self._grad_query)
            if self._seen.add(tile):
                grad_query += part.query
            else:
                grad_query.copy_(part.query)
            local.add_to_keys(grad_key, part.key)
            local.add_to_keys(grad_value, part.value)


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
