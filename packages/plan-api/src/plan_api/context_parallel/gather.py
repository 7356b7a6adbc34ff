"""All keys and values on every rank, for its own queries (Llama 3, section 3.3.2).

One all-gather of both forward, one reduce-scatter of their gradients back. What was gathered is
kept for backward: as many keys and values as one device would keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial as Sum
from torch.distributed.tensor import Replicate, Shard

from plan_api.context_parallel.kernel import Partial, kernel_of
from plan_api.context_parallel.merge import Merged, accumulator
from plan_api.context_parallel.order import Piece, pieces_over_all
from plan_api.context_parallel.setting import Setting
from plan_api.runtime.error_context import annotate_backward_errors
from plan_api.runtime.local_redistribute import local_redistribution

__all__ = ["gathered_attention"]

_SEQUENCE = 3  # of keys and values stacked


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: Setting
) -> torch.Tensor:
    """Attention over all ranks' keys.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its heads divide the queries'.
        value: this rank's, of the shape of the keys.
        setting: of the call.
    """
    out: torch.Tensor = _Gathered.apply(query, key, value, setting)  # type: ignore[no-untyped-call]
    return out


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: Setting
    ) -> torch.Tensor:
        gather = local_redistribution(
            Shard(_SEQUENCE), Replicate(), setting.mesh, setting.axis, setting.where
        )
        whole = _in_sequence(gather(torch.stack([key, value])), setting)
        kernel, merged = kernel_of(query, setting.scale), Merged(query)
        for piece in _pieces(query, whole, setting):
            part = kernel.forward(query, whole[0], whole[1], piece)
            merged.add(piece, part.out, part.lse)
        out, lse = merged.result()
        ctx.save_for_backward(query, whole, out, lse)
        ctx.setting, ctx.at = setting, setting.in_backward
        return out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, whole, out, lse = ctx.saved_tensors
        setting: Setting = ctx.setting
        kernel, dtype = kernel_of(query, setting.scale), accumulator(query.dtype)
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_whole, over_all = torch.zeros_like(whole, dtype=dtype), Partial(out, lse)
        for piece in _pieces(query, whole, setting):
            found = kernel.backward(grads[0], query, whole[0], whole[1], over_all, piece)
            grad_query[:, :, piece.queries] += found.query
            grad_whole[0][:, :, piece.keys] += found.key
            grad_whole[1][:, :, piece.keys] += found.value
        scatter = local_redistribution(
            Sum(), Shard(_SEQUENCE), setting.mesh, setting.axis, setting.where
        )
        own = scatter(_by_rank(grad_whole, setting)).to(whole.dtype)
        return grad_query.to(query.dtype), own[0], own[1], None


def _pieces(query: torch.Tensor, whole: torch.Tensor, setting: Setting) -> Iterator[Piece]:
    queries, keys = query.shape[2], whole.shape[_SEQUENCE]
    return pieces_over_all(setting.order, setting.rank, queries, keys, setting.causal)


def _in_sequence(by_rank: torch.Tensor, setting: Setting) -> torch.Tensor:
    """From one rank after the other to the order of the sequence."""
    if setting.order.name == "contiguous":
        return by_rank
    positions = setting.order.positions(by_rank.shape[_SEQUENCE], by_rank.device)
    return by_rank.index_select(_SEQUENCE, positions.argsort())


def _by_rank(in_sequence: torch.Tensor, setting: Setting) -> torch.Tensor:
    """And back."""
    if setting.order.name == "contiguous":
        return in_sequence
    positions = setting.order.positions(in_sequence.shape[_SEQUENCE], in_sequence.device)
    return in_sequence.index_select(_SEQUENCE, positions)
