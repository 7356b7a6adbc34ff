"""Calls torch's fused attention kernels tile by tile.

Queries are (batch, key-value heads, query heads of each, queries, features): a group of query heads
has one key-value head. On a CPU the queries of a group are rows of one product with its keys, which
are neither repeated nor read again; other kernels get the heads of keys repeated.

The kernels return the log-sum-exp of the scores beside the output. Backward of a tile is the
kernel's own, with the output and the log-sum-exp over all keys: they give the probabilities over
all keys, so the gradients of tiles add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from plan_api._compat import on_host
from plan_api.context_parallel.online_softmax import accumulation_dtype
from plan_api.context_parallel.tiles import AttentionTile

__all__ = [
    "AttentionGradients",
    "AttentionKernel",
    "AttentionOutput",
    "TileOptions",
    "select_kernel",
]

_aten = torch.ops.aten


@dataclass(frozen=True)
class AttentionOutput:
    """Attention over some keys: the output, of the queries' dims, and the log-sum-exp of each."""

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
    """

    causal: bool = False
    mask: torch.Tensor | None = None
    factors: torch.Tensor | None = None


class AttentionKernel(ABC):
    """Attention of a tile.

    Keys and values are (batch, key-value heads, keys, features). Values may have other features
    than keys.

    Attributes:
        causal_queries: of causal tiles at most, as it computes larger ones in vain above the
            diagonal.
        causal_strip: of causal tiles at most where these have more keys than queries; None: it
            takes only causal tiles with as many keys as queries.
        has_group_rows: whether queries of a group are rows of one product.

    Args:
        scale: of products before the softmax.
        groups: the number of query heads of each key-value head.
    """

    causal_queries = 2048
    causal_strip: int | None = None
    has_group_rows = False

    def __init__(self, scale: float, groups: int) -> None:
        self._scale, self._groups = scale, groups

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
            query: all queries of this rank.
            key: all keys at hand.
            value: as the keys.
            tile: which of them to compute.
            options: of the tile; None: by its kind, which is not masked.
        """
        options = options or TileOptions(tile.kind == "causal")
        features = value.shape[-1]
        own, keys, values = _with_equal_features(
            self._join(query[tile.rows, :, :, tile.queries]),
            self._repeat(key[tile.rows, :, tile.keys]),
            self._repeat(value[tile.rows, :, tile.keys]),
        )
        part = self._forward(own, keys, values, options)
        out, lse = self._separate(part.out[..., :features]), self._separate(part.lse)
        if options.mask is not None:
            # Kernels differ in what they return for queries that attend to nothing.
            attends = options.mask.any(-1)
            out = torch.where(attends[:, None], out, 0)
            lse = torch.where(attends, lse, -torch.inf)
        return AttentionOutput(out, lse)

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
        """Computes one tile's terms of the gradients of its queries, keys and values.

        Args:
            grad: of the output of all queries over all keys.
            query: as in forward.
            key: as in forward.
            value: as in forward.
            output: the output of all queries over all keys, and its log-sum-exp.
            tile: as in forward.
            options: as in forward.
        """
        options = options or TileOptions(tile.kind == "causal")
        features, value_features = key.shape[-1], value.shape[-1]
        own, out, grad, lse = (
            self._join(one[tile.rows, :, :, tile.queries])
            for one in (query, output.out, grad, output.lse)
        )
        keys, values = (self._repeat(one[tile.rows, :, tile.keys]) for one in (key, value))
        own, keys, values, out, grad = _with_equal_features(own, keys, values, out, grad)
        grads = self._backward(grad, own, keys, values, AttentionOutput(out, lse), options)
        return AttentionGradients(
            self._separate(grads.query[..., :features]),
            self._sum(grads.key[..., :features]),
            self._sum(grads.value[..., :value_features]),
        )

    def _join(self, tensor: torch.Tensor) -> torch.Tensor:
        """Joins the groups' dim with the queries', or with the heads'."""
        return tensor.transpose(2, 3).flatten(2, 3) if self.has_group_rows else tensor.flatten(1, 2)

    def _separate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Undoes `_join`."""
        dim = 2 if self.has_group_rows else 1
        separated: torch.Tensor = tensor.unflatten(dim, (-1, self._groups))
        return separated.transpose(2, 3) if self.has_group_rows else separated

    def _repeat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Repeats key-value heads for their groups of query heads, if these are joined as heads."""
        if self.has_group_rows or self._groups == 1:
            return tensor
        return tensor.repeat_interleave(self._groups, dim=1)

    def _sum(self, grad: torch.Tensor) -> torch.Tensor:
        """Adds up the gradients of the heads that `_repeat` has repeated."""
        if self.has_group_rows or self._groups == 1:
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


class _CpuFlash(AttentionKernel):
    """The CPU's flash attention, for all floating dtypes.

    It computes all pairs of up to 512 keys, and is slower the fewer queries there are, which are
    rows of its products: strips of 128 queries are about the best of both.
    """

    causal_queries = 1024
    causal_strip = 128
    has_group_rows = True

    def _forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: TileOptions
    ) -> AttentionOutput:
        return AttentionOutput(
            *_aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, attn_mask=self._bias(options, query, key), scale=self._scale
            )
        )

    def _backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: AttentionOutput,
        options: TileOptions,
    ) -> AttentionGradients:
        return AttentionGradients(
            *_aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output.out, output.lse, 0.0, False,
                attn_mask=self._bias(options, query, key), scale=self._scale,
            )
        )  # fmt: skip

    def _bias(
        self, options: TileOptions, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns what is added to scores, for the rows of all groups."""
        if not options.causal:
            return _bias(options, query, self._groups)
        rows, keys = query.shape[2], key.shape[2]
        first = self.causal_queries + rows // self._groups - keys
        every = _causal_bias(self.causal_strip, self.causal_queries, self._groups, query.dtype)
        return every[:, :, :rows, first : first + keys]


class _CudaFlash(AttentionKernel):
    """CUDA's flash attention, for 16 bits; it takes no mask, so masked tiles are the other's."""

    def __init__(self, scale: float, groups: int) -> None:
        super().__init__(scale, groups)
        self._masked = _CudaEfficient(scale, groups)

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


class _CudaEfficient(AttentionKernel):
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


class _Operators(AttentionKernel):
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


def select_kernel(
    query: torch.Tensor, scale: float | None, *, has_dropout: bool = False
) -> AttentionKernel:
    """Selects the kernel for the device, dtype and number of features of queries.

    Args:
        query: the queries, with groups.
        scale: of products before the softmax; None: by the root of the number of features.
        has_dropout: whether weights are dropped, which fused kernels do by other masks.

    Raises:
        NotImplementedError: no fused kernel of the CPU or of CUDA returns the log-sum-exp for them.
    """
    device, groups = query.device.type, query.shape[2]
    half = query.dtype in (torch.float16, torch.bfloat16)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if has_dropout:
        return _Operators(scale, groups)
    if device == "cpu" and query.dtype.is_floating_point:
        return _CpuFlash(scale, groups)
    if device == "cuda" and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        return _CudaFlash(scale, groups)
    if device == "cuda" and (half or query.dtype is torch.float32):
        return _CudaEfficient(scale, groups)
    if device not in ("cpu", "cuda") and query.dtype.is_floating_point:
        return _Operators(scale, groups)
    raise NotImplementedError(
        f"torch has no fused attention for {query.dtype} on {device!r} that returns the "
        f"log-sum-exp, which ring and all-gather need; use method='ulysses'"
    )


def _no_random_state(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the seed and the offset of dropout, which is not used."""
    return (like.new_zeros(2, dtype=torch.uint64), like.new_zeros(0, dtype=torch.uint64))


def _with_equal_features(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pads features by zeros to the largest number, as fused kernels take one for all."""
    features = max(one.shape[-1] for one in tensors)
    return tuple(
        one if one.shape[-1] == features else F.pad(one, (0, features - one.shape[-1]))
        for one in tensors
    )


def _bias(options: TileOptions, query: torch.Tensor, groups: int = 1) -> torch.Tensor | None:
    """Returns what is added to scores: minus infinity where masked, (1, 1, queries, keys).

    Each query has as many rows as there are groups.
    """
    if options.mask is None:
        return None
    mask = options.mask.repeat_interleave(groups, dim=0) if groups > 1 else options.mask
    return torch.where(mask, query.new_zeros(()), query.new_full((), -torch.inf))[None, None]


@lru_cache(maxsize=8)
@on_host
def _causal_bias(queries: int, keys: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bias of all causal tiles of up to this number of queries, and keys before them.

    It is (1, 1, queries x groups, keys + queries), and row n attends to ``keys + n // groups + 1``
    keys; a tile has its first rows, and the columns up to the last that its last row attends to.
    """
    bias = torch.full((queries, keys + queries), -torch.inf, dtype=dtype).triu(keys + 1)
    return bias.repeat_interleave(groups, dim=0)[None, None]


def _aligned_bias(options: TileOptions, query: torch.Tensor) -> torch.Tensor | None:
    """Returns the bias for each batch and head, whose rows begin at multiples of 16 elements."""
    bias = _bias(options, query)
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % 16))[..., :keys].expand(*query.shape[:2], -1, -1)
