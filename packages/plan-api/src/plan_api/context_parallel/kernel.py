"""Torch's own fused attention kernels, called for one piece: they return the log-sum-exp.

Backward of a piece is the kernel's own, given the output and the log-sum-exp over all keys: from
these it has the probabilities among all, so that the pieces' gradients add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from plan_api.context_parallel.order import Piece

__all__ = ["Gradients", "Kernel", "Partial", "kernel_of"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Partial:
    """Attention over some keys: the output, and the log-sum-exp of (batch, heads, queries)."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """Of queries, keys and values."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Kernel(ABC):
    """One way to compute attention; all tensors are (batch, heads, sequence, features).

    Args:
        scale: of products before the softmax; None: by the root of the number of features.
    """

    def __init__(self, scale: float | None) -> None:
        self._scale = scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece
    ) -> Partial:
        """Attention of one piece.

        Args:
            query: of which the piece takes some.
            key: of which it takes some; there may be fewer heads than of queries.
            value: as the keys.
            piece: see there.
        """
        heads = query.shape[1]
        keys, values = (_repeated(one[:, :, piece.keys], heads) for one in (key, value))
        return self._forward(query[:, :, piece.queries], keys, values, piece.causal)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        whole: Partial,
        piece: Piece,
    ) -> Gradients:
        """What one piece contributes, to the gradients of its own queries and keys.

        Args:
            grad: of the output over all keys, of all queries.
            query: as in forward.
            key: as in forward.
            value: as in forward.
            whole: the output of all queries over all keys, and its log-sum-exp.
            piece: as in forward.
        """
        heads, own, of = query.shape[1], key.shape[1], piece.queries
        keys, values = (_repeated(one[:, :, piece.keys], heads) for one in (key, value))
        part = Partial(whole.out[:, :, of], whole.lse[:, :, of])
        found = self._backward(grad[:, :, of], query[:, :, of], keys, values, part, piece.causal)
        return Gradients(found.query, _summed(found.key, own), _summed(found.value, own))

    @abstractmethod
    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> Partial: ...

    @abstractmethod
    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        whole: Partial,
        causal: bool,
    ) -> Gradients: ...


class _CpuFlash(Kernel):
    """Of a CPU, for all floating dtypes."""

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> Partial:
        return Partial(
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
        whole: Partial,
        causal: bool,
    ) -> Gradients:
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, whole.out, whole.lse, 0.0, causal, scale=self._scale
            )
        )


class _CudaFlash(Kernel):
    """Of CUDA, for 16 bits."""

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> Partial:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=self._scale
        )
        return Partial(out, lse)

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        whole: Partial,
        causal: bool,
    ) -> Gradients:
        lengths = (None, None, query.shape[2], key.shape[2])
        return Gradients(
            *_aten._scaled_dot_product_flash_attention_backward(
                grad, query, key, value, whole.out, whole.lse.contiguous(), *lengths, 0.0, causal,
                *_no_random_state(query), scale=self._scale,
            )
        )  # fmt: skip


class _CudaEfficient(Kernel):
    """Of CUDA, for 32 bits too; its log-sum-exp is padded to a multiple of 32 queries."""

    _ALIGNED = 32

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
    ) -> Partial:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=self._scale
        )
        return Partial(out, lse[..., : query.shape[2]])

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        whole: Partial,
        causal: bool,
    ) -> Gradients:
        lse = F.pad(whole.lse, (0, -query.shape[2] % self._ALIGNED), value=torch.inf)
        wanted = (True, True, True, False)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, None, whole.out, lse.contiguous(), *_no_random_state(query),
            0.0, wanted, causal, scale=self._scale,
        )  # fmt: skip
        return Gradients(*found[:3])


def kernel_of(query: torch.Tensor, scale: float | None) -> Kernel:
    """The kernel for tensors like this.

    Args:
        query: any.
        scale: of products before the softmax; None: by the root of the number of features.

    Raises:
        NotImplementedError: there is none that returns the log-sum-exp.
    """
    device, half = query.device.type, query.dtype in (torch.float16, torch.bfloat16)
    if device == "cpu" and query.dtype.is_floating_point:
        return _CpuFlash(scale)
    if device == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        return _CudaFlash(scale)
    if device == "cuda" and (half or query.dtype is torch.float32):
        return _CudaEfficient(scale)
    raise NotImplementedError(
        f"torch has no fused attention for {query.dtype} on {device!r} that returns the "
        f"log-sum-exp, which ring and all-gather need; use method='ulysses'"
    )


def _no_random_state(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The seed and the offset of a dropout that there is not."""
    return (like.new_zeros(2, dtype=torch.uint64), like.new_zeros(0, dtype=torch.uint64))


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """As many heads as queries have: each serves the group that follows it."""
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def _summed(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """What `_repeated` has repeated, added up."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
