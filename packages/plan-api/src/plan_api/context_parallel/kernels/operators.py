"""Attention of one tile by torch's operators."""

from __future__ import annotations

import torch

from plan_api.context_parallel.kernels.kernel import (
    AttentionGradients,
    AttentionKernel,
    AttentionOutput,
    TileOptions,
)
from plan_api.context_parallel.online_softmax import accumulation_dtype

__all__ = ["Operators"]


class Operators(AttentionKernel):
    """Attention by torch's operators: with dropout, and where no kernel returns a log-sum-exp.

    The scores of a tile are in memory, in at least 32 bits.
    """

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput:
        scores = self._scores(query, key, options)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        if options.factors is not None:
            weights = weights * options.factors
        return AttentionOutput((weights @ value.to(weights.dtype)).to(query.dtype), lse)

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients:
        weights = (self._scores(query, key, options) - output.lse.unsqueeze(-1)).exp()
        dtype = weights.dtype
        grad, out = grad.to(dtype), output.out.to(dtype)
        grad_weights, dropped = grad @ value.to(dtype).mT, weights
        if options.factors is not None:
            grad_weights, dropped = grad_weights * options.factors, weights * options.factors
        grad_weights = grad_weights - (grad * out).sum(-1, keepdim=True)
        grad_scores = weights * grad_weights * self._scale
        return AttentionGradients(
            (grad_scores @ key.to(dtype)).to(query.dtype),
            (grad_scores.mT @ query.to(dtype)).to(key.dtype),
            (dropped.mT @ grad).to(value.dtype),
        )

    def _scores(self, query: torch.Tensor, key: torch.Tensor, options: TileOptions) -> torch.Tensor:
        """Products of queries and keys, scaled; minus infinity where masked."""
        dtype = accumulation_dtype(query.dtype)
        scores = (query.to(dtype) @ key.to(dtype).mT) * self._scale
        if options.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores if options.mask is None else scores.masked_fill(~options.mask, -torch.inf)
