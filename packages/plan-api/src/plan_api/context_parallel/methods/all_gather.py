"""All-gather attention: every rank gathers all keys and values (Llama 3, section 3.3.2).

It takes one all-gather of keys and values forward, and one reduce-scatter of their gradients
backward. The gathered tensors are saved for backward: as many keys and values as on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.dropout import DropoutMasks
from plan_api.context_parallel.kernels import AttentionOutput
from plan_api.context_parallel.methods.block_attention import (
    Block,
    BlockBackward,
    BlockForward,
    pack,
    sinks_grad,
)
from plan_api.context_parallel.online_softmax import accumulation_dtype
from plan_api.runtime.error_context import annotate_backward_errors
from plan_api.runtime.local_redistribute import local_redistribution

__all__ = ["all_gather_attention"]

_SEQUENCE = 2


def all_gather_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention over all ranks' keys.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its number of heads divides the queries'.
        value: this rank's, as the keys; it may have other features.
        call: the other arguments of the call.
        sinks: a score of each head for a key without a value, (heads); None: there is none.
    """
    out: torch.Tensor = _AllGatherAttention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        call: AttentionCall,
    ) -> torch.Tensor:
        call.check(query, key)
        masks = DropoutMasks.begin(call.dropout) if call.dropout is not None else None
        attention = BlockForward(query, key, value, call, masks)
        assert call.axis is not None
        gather = local_redistribution(
            Shard(_SEQUENCE), Replicate(), call.mesh, call.axis, call.where
        )
        gathered = _to_sequence_order(gather(pack(key, value)), call)
        attention.add(_block(gathered, key.shape[-1], call))
        output = attention.result(sinks)
        ctx.save_for_backward(attention.query, gathered, sinks, output.out, output.lse)
        ctx.call, ctx.masks, ctx.at = call, masks, call.backward_context
        ctx.features, ctx.kernels = key.shape[-1], attention.kernels
        return output.out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, gathered, sinks, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        assert call.axis is not None
        output, features = AttentionOutput(out, lse), ctx.features
        attention = BlockBackward(grads[0], query, output, ctx.kernels, call, ctx.masks)
        grad_gathered = torch.zeros_like(gathered, dtype=accumulation_dtype(query.dtype))
        block = _block(gathered, features, call)
        attention.add(block, grad_gathered[..., :features], grad_gathered[..., features:])
        scatter = local_redistribution(
            Partial(), Shard(_SEQUENCE), call.mesh, call.axis, call.where
        )
        grad_own = scatter(_to_rank_order(grad_gathered, call)).to(gathered.dtype)
        return (
            attention.grad_query.to(query.dtype), grad_own[..., :features],
            grad_own[..., features:], sinks_grad(grads[0], output, sinks), None,
        )  # fmt: skip


def _block(gathered: torch.Tensor, features: int, call: AttentionCall) -> Block:
    key, value = gathered[..., :features], gathered[..., features:]
    return Block(key, value, call.block_of_all(), ((0, call.keys.padded_length),))


def _to_sequence_order(by_rank: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    if call.keys.is_contiguous:
        return by_rank
    return by_rank.index_select(_SEQUENCE, call.keys.positions(by_rank.device).argsort())


def _to_rank_order(sequence: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    if call.keys.is_contiguous:
        return sequence
    return sequence.index_select(_SEQUENCE, call.keys.positions(sequence.device))
