"""FlexAttention of one block, compiled (torch.nn.attention.flex_attention; arXiv 2412.05496).

Its backward takes the output and the log-sum-exp over the keys of its forward. Those of the block
are computed again in backward, instead of stored for each block: their gradients follow from the
output over all keys, which is their average by the exponential of the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from plan_api.context_parallel.kernels.kernel import (
    AttentionGradients,
    AttentionKernel,
    AttentionOutput,
    TileOptions,
)

__all__ = ["Flex"]


class Flex(AttentionKernel):
    """FlexAttention, compiled but on a CPU, where torch compiles no log-sum-exp."""

    has_group_heads = True

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput:
        assert options.pairs is not None
        out, lse = self._attention(query, key, value, options)
        attends = options.pairs.attends.unsqueeze(1)
        # As for other kernels, queries that attend to nothing are not left to the kernel.
        out = torch.where(attends.unsqueeze(-1), out, 0)
        return AttentionOutput(out, torch.where(attends, lse, -torch.inf))

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients:
        assert options.pairs is not None
        inputs = query, key, value = tuple(
            one.detach().requires_grad_() for one in (query, key, value)
        )
        with torch.enable_grad():
            out, lse = self._attention(query, key, value, options)
        attends, dtype = options.pairs.attends.unsqueeze(1), output.lse.dtype
        weight = torch.where(attends, (lse.detach() - output.lse).exp(), 0)
        step = (out.detach().to(dtype) - output.out.to(dtype)) * grad.to(dtype)
        grads = (grad * weight.unsqueeze(-1)).to(out.dtype), (weight * step.sum(-1)).to(lse.dtype)
        return AttentionGradients(*torch.autograd.grad((out, lse), inputs, grads))

    def _attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.attention.flex_attention import AuxRequest, flex_attention

        assert options.pairs is not None
        attention: Callable[..., Any] = flex_attention
        if query.device.type != "cpu":
            attention = _compiled(attention)
        out, aux = attention(
            query, key, value, block_mask=options.pairs.mask, scale=self._scale,
            enable_gqa=self._groups > 1, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return out, aux.lse


@lru_cache(maxsize=1)
def _compiled(attention: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(attention)
