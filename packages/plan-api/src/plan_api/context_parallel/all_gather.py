"""All-gather attention: every rank gathers all keys and values (Llama 3, section 3.3.2).

It takes one all-gather of keys and values forward, and one reduce-scatter of their gradients
backward. The gathered tensors are saved for backward: as many keys and values as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.context_parallel.kernels import (
    AttentionOutput,
    OnlineSoftmax,
    accumulation_dtype,
    select_kernel,
)
from plan_api.context_parallel.order import AttentionCall, AttentionTile, tiles_over_all
from plan_api.runtime.error_context import annotate_backward_errors
from plan_api.runtime.local_redistribute import local_redistribution

__all__ = ["all_gather_attention"]

_SEQUENCE = 2


def all_gather_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Computes attention over all ranks' keys.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its number of heads divides the queries'.
        value: this rank's, of the shape of the keys; it may have another number of features.
        call: the other arguments of the call.
    """
    out: torch.Tensor = _AllGatherAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        gather = local_redistribution(
            Shard(_SEQUENCE), Replicate(), call.mesh, call.axis, call.where
        )
        gathered = _to_sequence_order(gather(torch.cat([key, value], -1)), call)
        features = [key.shape[-1], value.shape[-1]]
        kernel = select_kernel(query, value, call.scale)
        merged, (keys, values) = OnlineSoftmax(query, features[1]), gathered.split(features, -1)
        for tile in _tiles(query, gathered, call):
            part = kernel.forward(query, keys, values, tile)
            merged.add(tile, part.out, part.lse)
        out, lse = merged.result()
        ctx.save_for_backward(query, gathered, out, lse)
        ctx.call, ctx.at, ctx.features = call, call.backward_context, features
        return out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, gathered, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        keys, values = gathered.split(ctx.features, -1)
        kernel, dtype = select_kernel(query, values, call.scale), accumulation_dtype(query.dtype)
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_gathered, output = torch.zeros_like(gathered, dtype=dtype), AttentionOutput(out, lse)
        for tile in _tiles(query, gathered, call):
            part = kernel.backward(grads[0], query, keys, values, output, tile)
            grad_query[:, :, tile.queries] += part.query
            grad_gathered[:, :, tile.keys] += torch.cat([part.key, part.value], -1)
        scatter = local_redistribution(
            Partial(), Shard(_SEQUENCE), call.mesh, call.axis, call.where
        )
        grad_local = scatter(_to_rank_order(grad_gathered, call)).to(gathered.dtype)
        grad_key, grad_value = grad_local.split(ctx.features, -1)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _tiles(
    query: torch.Tensor, gathered: torch.Tensor, call: AttentionCall
) -> Iterator[AttentionTile]:
    queries, keys = query.shape[2], gathered.shape[_SEQUENCE]
    return tiles_over_all(call.order, call.rank, queries, keys, call.causal)


def _to_sequence_order(by_rank: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    if call.order.name == "contiguous":
        return by_rank
    positions = call.order.positions(by_rank.shape[_SEQUENCE], by_rank.device)
    return by_rank.index_select(_SEQUENCE, positions.argsort())


def _to_rank_order(sequence: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    if call.order.name == "contiguous":
        return sequence
    positions = call.order.positions(sequence.shape[_SEQUENCE], sequence.device)
    return sequence.index_select(_SEQUENCE, positions)
