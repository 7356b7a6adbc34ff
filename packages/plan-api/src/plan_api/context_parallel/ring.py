"""Ring attention: keys and values are sent around the ring of ranks (Liu et al., arXiv 2310.01889).

In each round a rank computes with one block, while it sends this block to the next rank and
receives another from the previous one: two buffers, so that neither waits for the other. In
backward the blocks go around again, each followed by its gradient, to which every rank adds its
term while the next block is in flight; the last round returns the gradient to the block's rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from plan_api.context_parallel.kernels import (
    AttentionOutput,
    OnlineSoftmax,
    accumulation_dtype,
    select_kernel,
)
from plan_api.context_parallel.order import AttentionCall, AttentionTile, tile_between
from plan_api.runtime.error_context import annotate_backward_errors

__all__ = ["ring_attention"]


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Computes attention over all ranks' keys.

    On N ranks each sends N-1 messages forward, and 2N-1 backward.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its number of heads divides the queries'.
        value: this rank's, of the shape of the keys; it may have another number of features.
        call: the other arguments of the call.
    """
    out: torch.Tensor = _RingAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out


class _RingExchange:
    """Sends a tensor to the next rank, and receives one from the previous rank."""

    def __init__(
        self, send_buffer: torch.Tensor, receive_buffer: torch.Tensor, call: AttentionCall
    ) -> None:
        group, rank, ranks = call.mesh.get_group(call.axis), call.rank, call.order.ranks
        self._send_buffer, self._receive_buffer = send_buffer, receive_buffer
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, send_buffer, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, receive_buffer, group=group, group_peer=(rank - 1) % ranks),
            ]
        )

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the received tensor, and the buffer that can be written again."""
        with record_function("ring: wait"):
            for work in self._works:
                work.wait()
        return self._receive_buffer, self._send_buffer


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        kernel = select_kernel(query, value, call.scale)
        merged, features = OnlineSoftmax(query, value.shape[-1]), [key.shape[-1], value.shape[-1]]
        block = torch.cat([key, value], -1)
        spare = torch.empty_like(block)
        for step in range(call.order.ranks):
            exchange = _RingExchange(block, spare, call) if step + 1 < call.order.ranks else None
            tile = _tile(query, key, call, step)
            if tile is not None:
                with record_function("ring: compute"):
                    part = kernel.forward(query, *block.split(features, -1), tile)
                    merged.add(tile, part.out, part.lse)
            if exchange is not None:
                block, spare = exchange.wait()
        out, lse = merged.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call, ctx.at = call, call.backward_context
        return out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        call: AttentionCall = ctx.call
        kernel, output = select_kernel(query, value, call.scale), AttentionOutput(out, lse)
        ranks, features = call.order.ranks, [key.shape[-1], value.shape[-1]]
        grad_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
        block = torch.cat([key, value], -1)
        spare = torch.empty_like(block)
        # The gradient of the current block, with the terms of the ranks that had it before.
        grad_block = torch.zeros_like(block, dtype=grad_query.dtype)
        grad_spare = torch.empty_like(grad_block)
        grad_exchange: _RingExchange | None = None
        for step in range(ranks):
            exchange = _RingExchange(block, spare, call) if step + 1 < ranks else None
            tile = _tile(query, key, call, step)
            if tile is not None:
                with record_function("ring: compute"):
                    keys, values = block.split(features, -1)
                    part = kernel.backward(grads[0], query, keys, values, output, tile)
                    grad_query[:, :, tile.queries] += part.query
            if grad_exchange is not None:
                grad_block, grad_spare = grad_exchange.wait()
            if tile is not None:
                grad_block[:, :, tile.keys] += torch.cat([part.key, part.value], -1)
            if ranks > 1:
                grad_exchange = _RingExchange(grad_block, grad_spare, call)
            if exchange is not None:
                block, spare = exchange.wait()
        if grad_exchange is not None:
            grad_block, _ = grad_exchange.wait()
        grad_key, grad_value = grad_block.to(key.dtype).split(features, -1)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _tile(
    query: torch.Tensor, key: torch.Tensor, call: AttentionCall, step: int
) -> AttentionTile | None:
    """Returns what this rank's queries attend to in the block of a round."""
    order, rank = call.order, call.rank
    source = (rank - step) % order.ranks
    return tile_between(order, rank, source, query.shape[2], key.shape[2], call.causal)
