"""Calls torch's fused attention kernels tile by tile.

A group of query heads has one key-value head. On a CPU the queries of a group are rows of one
product with its keys, which are neither repeated nor read again; other kernels get the heads of
keys repeated. So kernels take rows, which `AttentionKernel.join` makes of a call's queries, once
for all tiles. They return (batch, key-value heads, query heads of each, queries, features).

The kernels return the log-sum-exp of the scores beside the output. Backward of a tile is the
kernel's own, with the output and the log-sum-exp over all keys: they give the probabilities over
all keys, so the gradients of tiles add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plan_api.context_parallel.tiles import (
    AttentionTile,
    BlockPairs,
    causal_strips,
    divide_causal,
    join_equal,
    window_strips,
)

__all__ = [
    "AttentionGradients",
    "AttentionKernel",
    "AttentionOutput",
    "TileOptions",
    "bias_of_mask",
]


@dataclass(frozen=True)
class AttentionOutput:
    """Attention over some keys: the output of some queries, and the log-sum-exp of each."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionGradients:
    """Gradients of queries, keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class TileOptions:
    """What a kernel computes beside products.

    Attributes:
        causal: the last query attends to all keys, and each other to one fewer than the next.
        mask: bool of (queries, keys), true where attended; None: all are.
        factors: of the weights, (batch, heads, queries, keys), by dropout; None: there is none.
        pairs: of a block, for FlexAttention; None: the tile is of another kind.
    """

    causal: bool = False
    mask: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    pairs: BlockPairs | None = None


class AttentionKernel(ABC):
    """Attention of a tile.

    Keys and values are (batch, key-value heads, keys, features). Values may have other features
    than keys.

    Attributes:
        causal_queries: of causal tiles at most, as it computes larger ones in vain above the
            diagonal.
        causal_strips: the arguments of `causal_strips`, by which causal tiles are divided into some
            that have more keys than queries; None: they are not.
        window_strips: the arguments of `window_strips`, by which those of windows are divided.
        has_group_rows: whether queries of a group are rows of one product.
        has_group_heads: whether a group of query heads takes its key-value head as it is.
        joins_tiles: whether a call takes several tiles of equal sizes.

    Args:
        scale: of products before the softmax.
        groups: the number of query heads of each key-value head.
    """

    causal_queries = 2048
    causal_strips: tuple[int, int] | None = None
    window_strips: tuple[int, int] = (64, 1024)
    has_group_rows = False
    has_group_heads = False
    joins_tiles = False

    def __init__(self, scale: float, groups: int) -> None:
        self._scale, self._groups = scale, groups

    @classmethod
    def divide(cls, tiles: Iterable[AttentionTile]) -> tuple[AttentionTile, ...]:
        """Returns the tiles of a block as the kernel computes them, one a call."""
        halves = [one for tile in tiles for one in divide_causal(tile, cls.causal_queries)]
        joined = join_equal(halves) if cls.joins_tiles else halves
        parts = [part for tile in joined for part in window_strips(tile, *cls.window_strips)]
        if cls.causal_strips is not None:
            parts = [part for tile in parts for part in causal_strips(tile, *cls.causal_strips)]
        if cls.joins_tiles:
            return tuple(parts)
        return tuple(one for part in parts for one in part.ranges())

    @property
    def rows(self) -> int:
        """The number of rows of a query."""
        return self._groups if self.has_group_rows else 1

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rows of a tensor of (batch, heads, queries, ...): (batch, ..., rows, ...)."""
        if self.rows == 1:
            return tensor
        grouped: torch.Tensor = tensor.unflatten(1, (-1, self.rows))
        return grouped.transpose(2, 3).flatten(2, 3)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tile: AttentionTile,
        options: TileOptions | None = None,
    ) -> AttentionOutput:
        """Computes attention of one tile.

        Args:
            query: the rows of all queries of this rank.
            key: all keys at hand.
            value: as the keys.
            tile: which of them to compute.
            options: of the tile; None: by its kind, which is not masked.
        """
        options = options or TileOptions(tile.kind == "causal")
        features, heads = value.shape[-1], key.shape[1]
        own, keys, values = _with_equal_features(
            _flat(tile.of_rows(query, self.rows), tile),
            self._repeat(_flat(tile.of_keys(key), tile)),
            self._repeat(_flat(tile.of_keys(value), tile)),
        )
        part = self._forward(own, keys, values, options)
        out, lse = part.out[..., :features], part.lse
        if options.mask is not None:
            # Kernels differ in what they return for queries that attend to nothing.
            attends = options.mask.any(-1).repeat_interleave(self.rows)
            out = torch.where(attends[:, None], out, 0)
            lse = torch.where(attends, lse, -torch.inf)
        return AttentionOutput(self._by_group(out, tile, heads), self._by_group(lse, tile, heads))

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        tile: AttentionTile,
        options: TileOptions | None = None,
    ) -> AttentionGradients:
        """Computes one tile's terms of the gradients of its rows, keys and values.

        Args:
            grad: of the output of all rows over all keys.
            query: as in forward.
            key: as in forward.
            value: as in forward.
            output: the output of all rows over all keys, and its log-sum-exp.
            tile: as in forward.
            options: as in forward.
        """
        options = options or TileOptions(tile.kind == "causal")
        features, value_features, heads = key.shape[-1], value.shape[-1], key.shape[1]
        own, out, grad, lse = (
            _flat(tile.of_rows(one, self.rows), tile)
            for one in (query, output.out, grad, output.lse)
        )
        keys, values = (self._repeat(_flat(tile.of_keys(one), tile)) for one in (key, value))
        own, keys, values, out, grad = _with_equal_features(own, keys, values, out, grad)
        grads = self._backward(grad, own, keys, values, AttentionOutput(out, lse), options)
        return AttentionGradients(
            self._by_group(grads.query[..., :features], tile, heads),
            _unflat(self._sum(grads.key[..., :features]), tile, heads),
            _unflat(self._sum(grads.value[..., :value_features]), tile, heads),
        )

    def _by_group(self, result: torch.Tensor, tile: AttentionTile, heads: int) -> torch.Tensor:
        """Returns (batch, key-value heads, groups, queries, ...) of a kernel's rows."""
        result, dim = _unflat(result, tile, heads), 2 if tile.count == 1 else 3
        if self.rows == 1:
            grouped: torch.Tensor = result.unflatten(1, (heads, self._groups))
            return grouped
        grouped = result.unflatten(dim, (-1, self._groups))
        return grouped.movedim(dim + 1, 2)

    def _repeat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Repeats key-value heads for their groups of query heads, if the kernel needs it."""
        if self.has_group_rows or self.has_group_heads or self._groups == 1:
            return tensor
        return tensor.repeat_interleave(self._groups, dim=1)

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        """Adds up the gradients of the heads that `_repeat` has repeated."""
        if self.has_group_rows or self.has_group_heads or self._groups == 1:
            return grad
        total: torch.Tensor = grad.unflatten(1, (-1, self._groups)).sum(2)
        return total

    @abstractmethod
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput: ...

    @abstractmethod
    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients: ...


def bias_of_mask(options: TileOptions, query: torch.Tensor, groups: int = 1) -> torch.Tensor | None:
    """Returns what is added to scores: minus infinity where masked, (1, 1, queries, keys).

    Each query has as many rows as there are groups.
    """
    if options.mask is None:
        return None
    mask = options.mask.repeat_interleave(groups, dim=0) if groups > 1 else options.mask
    return torch.where(mask, query.new_zeros(()), query.new_full((), -torch.inf))[None, None]


def _flat(tensor: torch.Tensor, tile: AttentionTile) -> torch.Tensor:
    """Returns a part of several ranges for a kernel, which are heads of batch x heads samples."""
    return tensor if tile.count == 1 else tensor.flatten(0, 1)


def _unflat(tensor: torch.Tensor, tile: AttentionTile, heads: int) -> torch.Tensor:
    """Undoes `_flat`."""
    return tensor if tile.count == 1 else tensor.unflatten(0, (-1, heads))


def _with_equal_features(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pads features by zeros to the largest number, as fused kernels take one for all."""
    features = max(one.shape[-1] for one in tensors)
    return tuple(
        one if one.shape[-1] == features else F.pad(one, (0, features - one.shape[-1]))
        for one in tensors
    )
