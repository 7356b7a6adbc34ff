"""CUDA's fused attention of one tile."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from plan_api.context_parallel.kernels.kernel import (
    AttentionGradients,
    AttentionKernel,
    AttentionOutput,
    TileOptions,
    bias_of_mask,
)

__all__ = ["CudaEfficient", "CudaFlash"]

_aten = torch.ops.aten


class CudaFlash(AttentionKernel):
    """CUDA's flash attention, for 16 bits; it takes no mask, so masked tiles are the other's."""

    def __init__(self, scale: float, groups: int) -> None:
        super().__init__(scale, groups)
        self._masked = CudaEfficient(scale, groups)

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput:
        if options.mask is not None:
            return self._masked._forward(query, key, value, options)
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, options.causal, False, scale=self._scale
        )
        return AttentionOutput(out, lse)

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients:
        if options.mask is not None:
            return self._masked._backward(grad, query, key, value, output, options)
        lengths = (None, None, query.shape[2], key.shape[2])
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, output.out, output.lse.contiguous(), *lengths, 0.0,
                options.causal, *_no_random_state(query), scale=self._scale,
            )
        )  # fmt: skip


class CudaEfficient(AttentionKernel):
    """CUDA's memory-efficient attention, for 32 bits too.

    Its log-sum-exp is padded to a multiple of 32 queries.
    """

    _ALIGNED = 32

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned_bias(options, query), True, 0.0, options.causal,
            scale=self._scale,
        )  # fmt: skip
        return AttentionOutput(out, lse[..., : query.shape[2]])

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients:
        lse = F.pad(output.lse, (0, -query.shape[2] % self._ALIGNED), value=torch.inf)
        needs_grad = (True, True, True, False)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, _aligned_bias(options, query), output.out, lse.contiguous(),
            *_no_random_state(query), 0.0, needs_grad, options.causal, scale=self._scale,
        )  # fmt: skip
        return AttentionGradients(*grads[:3])


def _no_random_state(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the seed and the offset of dropout, which is not used."""
    return (like.new_zeros(2, dtype=torch.uint64), like.new_zeros(0, dtype=torch.uint64))


def _aligned_bias(options: TileOptions, query: torch.Tensor) -> torch.Tensor | None:
    """Returns the bias for each batch and head, whose rows begin at multiples of 16 elements."""
    bias = bias_of_mask(options, query)
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(*query.shape[:2], -1, -1)
