"""The CPU's fused attention of one tile."""

from __future__ import annotations

from functools import lru_cache

import torch

from plan_api._compat import on_host
from plan_api.context_parallel.kernels.kernel import (
    AttentionGradients,
    AttentionKernel,
    AttentionOutput,
    TileOptions,
    bias_of_mask,
)

__all__ = ["CpuFlash"]

_aten = torch.ops.aten


class CpuFlash(AttentionKernel):
    """The CPU's flash attention, for all floating dtypes.

    It computes all pairs of up to 512 keys, and is slower the fewer queries there are, which are
    rows of its products: strips of 128 queries are about the best of both, and of 64 where a call
    has several.
    """

    causal_queries = 1024
    causal_strips = (64, 128)
    window_strips = (32, 1024)
    has_group_rows = True
    joins_tiles = True

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
            return bias_of_mask(options, query, self._groups)
        rows, keys = query.shape[2], key.shape[2]
        first = self.causal_queries + rows // self._groups - keys
        every = _causal_bias(self.causal_strips[1], self.causal_queries, self._groups, query.dtype)
        return every[:, :, :rows, first : first + keys]


@lru_cache(maxsize=8)
@on_host
def _causal_bias(queries: int, keys: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the bias of all causal tiles of up to this number of queries, and keys before them.

    It is (1, 1, queries x groups, keys + queries), and row n attends to ``keys + n // groups + 1``
    keys; a tile has its first rows, and the columns up to the last that its last row attends to.
    """
    bias = torch.full((queries, keys + queries), -torch.inf, dtype=dtype).triu(keys + 1)
    return bias.repeat_interleave(groups, dim=0)[None, None]
