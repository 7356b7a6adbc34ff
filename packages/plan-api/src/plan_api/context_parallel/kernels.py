"""Calls torch's fused attention kernels tile by tile, and merges tiles by online softmax.

The kernels return the log-sum-exp of the scores beside the output. Backward of a tile is the
kernel's own, with the output and the log-sum-exp over all keys: they give the probabilities over
all keys, so the gradients of tiles add up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from plan_api.context_parallel.order import AttentionTile

__all__ = [
    "AttentionGradients",
    "AttentionKernel",
    "AttentionOutput",
    "OnlineSoftmax",
    "accumulation_dtype",
    "select_kernel",
]

_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionOutput:
    """Attention over some keys: the output, and the log-sum-exp of (batch, heads, queries)."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionGradients:
    """Gradients of queries, keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class AttentionKernel(ABC):
    """A fused kernel; all tensors are (batch, heads, sequence, features).

    Values may have another number of features than queries and keys, as in latent attention. For
    kernels that take one number only, the smaller ones are padded with zeros, which contribute
    nothing to products, and to outputs only features that are dropped.

    Args:
        scale: of products before the softmax.
    """

    #: Whether values may have another number of features than keys.
    takes_other_values: ClassVar[bool] = False

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tile: AttentionTile
    ) -> AttentionOutput:
        """Computes attention of one tile.

        Args:
            query: all queries of this rank.
            key: all keys at hand; there may be fewer heads than of queries.
            value: as the keys.
            tile: which of them to compute.
        """
        heads, width = query.shape[1], self._width(key, value)
        keys, values = (_repeat_heads(full[:, :, tile.keys], heads) for full in (key, value))
        queries, keys, padded = (
            _pad_features(one, width) for one in (query[:, :, tile.queries], keys, values)
        )
        part = self._forward(queries, keys, padded, tile.causal)
        return AttentionOutput(part.out[..., : value.shape[-1]], part.lse)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        tile: AttentionTile,
    ) -> AttentionGradients:
        """Computes one tile's terms of the gradients of its queries, keys and values.

        Args:
            grad: of the output of all queries over all keys.
            query: as in forward.
            key: as in forward.
            value: as in forward.
            output: the output of all queries over all keys, and its log-sum-exp.
            tile: as in forward.
        """
        heads, key_heads, queries = query.shape[1], key.shape[1], tile.queries
        keys, values = (_repeat_heads(full[:, :, tile.keys], heads) for full in (key, value))
        width = self._width(key, value)
        upstream, own, keys, values, out = (
            _pad_features(one, width)
            for one in (
                grad[:, :, queries], query[:, :, queries], keys, values, output.out[:, :, queries]
            )
        )  # fmt: skip
        part = AttentionOutput(out, output.lse[:, :, queries])
        grads = self._backward(upstream, own, keys, values, part, tile.causal)
        of_keys, of_values = key.shape[-1], value.shape[-1]
        return AttentionGradients(
            grads.query[..., :of_keys],
            _sum_groups(grads.key[..., :of_keys], key_heads),
            _sum_groups(grads.value[..., :of_values], key_heads),
        )

    def _width(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """Returns the number of features up to which all tensors are padded; 0: none is."""
        return 0 if self.takes_other_values else max(key.shape[-1], value.shape[-1])

    @abstractmethod
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> AttentionOutput: ...

    @abstractmethod
    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        causal: bool,
    ) -> AttentionGradients: ...


class _CpuFlash(AttentionKernel):
    """The CPU's flash attention, for all floating dtypes."""

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> AttentionOutput:
        return AttentionOutput(
            *_aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, scale=self._scale
            )
        )

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        causal: bool,
    ) -> AttentionGradients:
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output.out, output.lse, 0.0, causal, scale=self._scale
            )
        )


class _CudaFlash(AttentionKernel):
    """CUDA's flash attention, for 16 bits."""

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> AttentionOutput:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=self._scale
        )
        return AttentionOutput(out, lse)

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        causal: bool,
    ) -> AttentionGradients:
        lengths = (None, None, query.shape[2], key.shape[2])
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, output.out, output.lse.contiguous(), *lengths, 0.0, causal,
                *_no_random_state(query), scale=self._scale,
            )
        )  # fmt: skip


class _CudaEfficient(AttentionKernel):
    """CUDA's memory-efficient attention, for 32 bits too.

    Its log-sum-exp is padded to a multiple of 32 queries.
    """

    _ALIGNED = 32

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> AttentionOutput:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=self._scale
        )
        return AttentionOutput(out, lse[..., : query.shape[2]])

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        causal: bool,
    ) -> AttentionGradients:
        lse = F.pad(output.lse, (0, -query.shape[2] % self._ALIGNED), value=torch.inf)
        needs_grad = (True, True, True, False)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, output.out, lse.contiguous(), *_no_random_state(query),
            0.0, needs_grad, causal, scale=self._scale,
        )  # fmt: skip
        return AttentionGradients(*grads[:3])


class _Operators(AttentionKernel):
    """Attention by torch's operators, for devices whose fused kernels return no log-sum-exp.

    The scores of a tile are in memory, in at least 32 bits.
    """

    takes_other_values = True

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> AttentionOutput:
        scores = self._scores(query, key, causal)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return AttentionOutput((weights @ value.to(weights.dtype)).to(query.dtype), lse)

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        causal: bool,
    ) -> AttentionGradients:
        weights = (self._scores(query, key, causal) - output.lse.unsqueeze(-1)).exp()
        dtype = weights.dtype
        grad, out = grad.to(dtype), output.out.to(dtype)
        grad_weights = grad @ value.to(dtype).mT - (grad * out).sum(-1, keepdim=True)
        grad_scores = weights * grad_weights * self._scale
        return AttentionGradients(
            (grad_scores @ key.to(dtype)).to(query.dtype),
            (grad_scores.mT @ query.to(dtype)).to(key.dtype),
            (weights.mT @ grad).to(value.dtype),
        )

    def _scores(self, query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
        """Products of queries and keys, scaled; those of later keys are minus infinity."""
        dtype = accumulation_dtype(query.dtype)
        scores = (query.to(dtype) @ key.to(dtype).mT) * self._scale
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return scores


def select_kernel(query: torch.Tensor, value: torch.Tensor, scale: float | None) -> AttentionKernel:
    """Selects the kernel for the device, dtype and numbers of features.

    Args:
        query: the queries, which have as many features as the keys.
        value: the values.
        scale: of products before the softmax; None: by the root of the number of queries' features.

    Raises:
        NotImplementedError: no fused kernel of the CPU or of CUDA returns the log-sum-exp for them.
    """
    device, half = query.device.type, query.dtype in (torch.float16, torch.bfloat16)
    features = max(query.shape[-1], value.shape[-1])
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if device == "cpu" and query.dtype.is_floating_point:
        return _CpuFlash(scale)
    if device == "cuda" and half and features <= 256 and features % 8 == 0:
        return _CudaFlash(scale)
    if device == "cuda" and (half or query.dtype is torch.float32):
        return _CudaEfficient(scale)
    if device not in ("cpu", "cuda") and query.dtype.is_floating_point:
        return _Operators(scale)
    raise NotImplementedError(
        f"torch has no fused attention for {query.dtype} on {device!r} that returns the "
        f"log-sum-exp, which ring and all-gather need; use method='ulysses'"
    )


def _no_random_state(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the seed and the offset of dropout, which is not used."""
    return (like.new_zeros(2, dtype=torch.uint64), like.new_zeros(0, dtype=torch.uint64))


def _pad_features(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Appends features of zeros up to a number of them."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing > 0 else tensor


def _repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeats each key head for its group of query heads."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _sum_groups(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """Adds up the gradients of the heads that `_repeat_heads` has repeated."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


class OnlineSoftmax:
    """Merges attention over disjoint ranges of keys into attention over all keys.

    The outputs are averaged, weighted by the exponential of their log-sum-exp (Milakov and
    Gimelshein, arXiv 1805.02867; Liu et al., "Ring Attention", arXiv 2310.01889).

    Args:
        query: (batch, heads, queries, features), of any floating dtype.
        features: of the output, as many as of values.
    """

    def __init__(self, query: torch.Tensor, features: int) -> None:
        dtype, shape = accumulation_dtype(query.dtype), (*query.shape[:-1], features)
        self._out = torch.zeros(shape, dtype=dtype, device=query.device)
        self._lse = torch.full(query.shape[:-1], -torch.inf, dtype=dtype, device=query.device)
        self._dtype = query.dtype

    def add(self, tile: AttentionTile, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds the output of a tile, whose keys these queries have not attended to yet.

        Args:
            tile: whose queries.
            out: (batch, heads, queries of the tile, features).
            lse: (batch, heads, queries of the tile), natural logarithm.
        """
        merged_out, merged_lse = self._out[:, :, tile.queries], self._lse[:, :, tile.queries]
        both = torch.logaddexp(merged_lse, lse)
        merged_out.mul_((merged_lse - both).exp().unsqueeze(-1))
        weight = (lse - both).exp().unsqueeze(-1).to(merged_out.dtype)
        merged_out.addcmul_(out.to(merged_out.dtype), weight)
        merged_lse.copy_(both)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output, in the queries' dtype, and the log-sum-exp."""
        return self._out.to(self._dtype), self._lse


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tiles are added up: at least 32 bits."""
    return torch.float64 if dtype is torch.float64 else torch.float32
