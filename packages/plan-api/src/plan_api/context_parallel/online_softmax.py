"""Merges attention over disjoint ranges of keys into attention over all keys."""

from __future__ import annotations

import torch

from plan_api.context_parallel.tiles import AttentionTile, SeenQueries

__all__ = ["OnlineSoftmax", "accumulation_dtype"]


class OnlineSoftmax:
    """Merges attention over disjoint ranges of keys into attention over all keys.

    The outputs are averaged, weighted by the exponential of their log-sum-exp (Milakov and
    Gimelshein, arXiv 1805.02867; Liu et al., "Ring Attention", arXiv 2310.01889).

    Args:
        query: (batch, key-value heads, groups, queries, features), of any floating dtype.
        features: of values.
    """

    def __init__(self, query: torch.Tensor, features: int) -> None:
        dtype = accumulation_dtype(query.dtype)
        shape = (*query.shape[:-1], features)
        self._out = torch.zeros(shape, dtype=dtype, device=query.device)
        self._lse = torch.full(shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        self._dtype, self._seen = query.dtype, SeenQueries(shape[0], shape[-2])

    def add(self, tile: AttentionTile, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the output of a tile, whose keys these queries have not attended to yet.

        Args:
            tile: whose queries.
            out: (batch, key-value heads, groups, queries of the tile, features), with a dim of
                ranges before that of queries if the tile has several.
            lse: as ``out`` without features, natural logarithm; minus infinity where a query
                attends to nothing.
        """
        merged_out, merged_lse = tile.of_queries(self._out), tile.of_queries(self._lse)
        if not self._seen.add(tile):
            merged_out.copy_(out)
            merged_lse.copy_(lse)
            return
        both = torch.logaddexp(merged_lse, lse)
        base = _finite(both)
        merged_out.mul_((merged_lse - base).exp().unsqueeze(-1))
        weight = (lse - base).exp().unsqueeze(-1).to(merged_out.dtype)
        merged_out.addcmul_(out.to(merged_out.dtype), weight)
        merged_lse.copy_(both)

    def add_sinks(self, sinks: torch.Tensor) -> None:
        """Adds a score to each query, of a key without a value (GPT-OSS, arXiv 2508.10925).

        Args:
            sinks: the scores of each head, with the dims of heads.
        """
        both = torch.logaddexp(self._lse, sinks.to(self._lse.dtype).unsqueeze(-1))
        self._out.mul_((self._lse - both).exp().unsqueeze(-1))
        self._lse.copy_(both)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, in the queries' dtype, and the log-sum-exp.

        Queries that attend to nothing have zeros in both.
        """
        return self._out.to(self._dtype), _finite(self._lse)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replaces minus infinity, which has no difference to itself, by zero."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tiles are added up: at least 32 bits."""
    return torch.float64 if dtype is torch.float64 else torch.float32
