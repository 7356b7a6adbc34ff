"""Attention over some keys and over others put together to that over all: online softmax.

Of each part the output and the log-sum-exp of its scores are known; the output over all is their
mean, weighted by exp(log-sum-exp) (Milakov and Gimelshein, arXiv 1805.02867; Liu et al., "Ring
Attention", arXiv 2310.01889).
"""

from __future__ import annotations

import torch

from plan_api.context_parallel.order import Piece

__all__ = ["Merged", "accumulator"]


class Merged:
    """What has been seen so far, of every query of this rank.

    Args:
        query: (batch, heads, queries, features), of any floating dtype.
    """

    def __init__(self, query: torch.Tensor) -> None:
        dtype = accumulator(query.dtype)
        self._out = torch.zeros(query.shape, dtype=dtype, device=query.device)
        self._lse = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        self._dtype = query.dtype

    def add(self, piece: Piece, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the output over keys that these queries have not seen yet.

        Args:
            piece: whose queries.
            out: (batch, heads, queries of the piece, features).
            lse: (batch, heads, queries of the piece), by the natural logarithm.
        """
        so_far, lse_so_far = self._out[:, :, piece.queries], self._lse[:, :, piece.queries]
        both = torch.logaddexp(lse_so_far, lse)
        so_far.mul_((lse_so_far - both).exp().unsqueeze(-1))
        so_far.addcmul_(out.to(so_far.dtype), (lse - both).exp().unsqueeze(-1).to(so_far.dtype))
        lse_so_far.copy_(both)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, in the queries' dtype, and the log-sum-exp."""
        return self._out.to(self._dtype), self._lse


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """In which parts are added up: at least 32 bits."""
    return torch.float64 if dtype is torch.float64 else torch.float32
