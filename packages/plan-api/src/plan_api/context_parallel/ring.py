"""Ring attention: keys and values go round, queries stay (Liu et al., arXiv 2310.01889).

In each round a rank computes with the block that it has, while it sends this block to the next
rank and receives another from the one before: two buffers, so that neither waits for the other. In
backward the blocks go round again, and behind each its gradient, to which every rank adds its
part while the next block is on its way; the last round brings it home.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from plan_api.context_parallel.kernel import Partial, kernel_of
from plan_api.context_parallel.merge import Merged, accumulator
from plan_api.context_parallel.order import Piece, piece_between
from plan_api.context_parallel.setting import Setting
from plan_api.runtime.error_context import annotate_backward_errors

__all__ = ["ring_attention"]


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: Setting
) -> torch.Tensor:
    """Attention over all ranks' keys; N - 1 rounds forward, and 2 N - 1 messages back.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its heads divide the queries'.
        value: this rank's, of the shape of the keys.
        setting: of the call.
    """
    out: torch.Tensor = _Ring.apply(query, key, value, setting)  # type: ignore[no-untyped-call]
    return out


class _Round:
    """A tensor on its way to the next rank, and one from the rank before on its way here."""

    def __init__(self, sent: torch.Tensor, into: torch.Tensor, setting: Setting) -> None:
        group, rank, ranks = setting.mesh.get_group(setting.axis), setting.rank, setting.order.ranks
        self._sent, self._into = sent, into
        to, come = (rank + 1) % ranks, (rank - 1) % ranks
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=to),
                dist.P2POp(dist.irecv, into, group=group, group_peer=come),
            ]
        )

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What has come, and the buffer that is free again."""
        with record_function("ring: wait"):
            for work in self._works:
                work.wait()
        return self._into, self._sent


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, setting: Setting
    ) -> torch.Tensor:
        kernel, merged = kernel_of(query, setting.scale), Merged(query)
        block = torch.stack([key, value])
        spare = torch.empty_like(block)
        for step in range(setting.order.ranks):
            coming = _Round(block, spare, setting) if step + 1 < setting.order.ranks else None
            piece = _piece(query, key, setting, step)
            if piece is not None:
                with record_function("ring: compute"):
                    part = kernel.forward(query, block[0], block[1], piece)
                    merged.add(piece, part.out, part.lse)
            if coming is not None:
                block, spare = coming.wait()
        out, lse = merged.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.setting, ctx.at = setting, setting.in_backward
        return out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        setting: Setting = ctx.setting
        kernel, whole, ranks = (
            kernel_of(query, setting.scale),
            Partial(out, lse),
            setting.order.ranks,
        )
        grad_query = torch.zeros_like(query, dtype=accumulator(query.dtype))
        block = torch.stack([key, value])
        spare = torch.empty_like(block)
        # The gradient of the block at hand, from the ranks that have had it before.
        grad_block = torch.zeros_like(block, dtype=grad_query.dtype)
        grad_spare = torch.empty_like(grad_block)
        grad_coming: _Round | None = None
        for step in range(ranks):
            coming = _Round(block, spare, setting) if step + 1 < ranks else None
            piece = _piece(query, key, setting, step)
            if piece is not None:
                with record_function("ring: compute"):
                    found = kernel.backward(grads[0], query, block[0], block[1], whole, piece)
                    grad_query[:, :, piece.queries] += found.query
            if grad_coming is not None:
                grad_block, grad_spare = grad_coming.wait()
            if piece is not None:
                grad_block[0][:, :, piece.keys] += found.key
                grad_block[1][:, :, piece.keys] += found.value
            if ranks > 1:
                grad_coming = _Round(grad_block, grad_spare, setting)
            if coming is not None:
                block, spare = coming.wait()
        if grad_coming is not None:
            grad_block, _ = grad_coming.wait()
        grad_key, grad_value = grad_block.to(key.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None


def _piece(query: torch.Tensor, key: torch.Tensor, setting: Setting, step: int) -> Piece | None:
    """What this rank's queries see of the block that they meet in a round."""
    order, rank = setting.order, setting.rank
    source = (rank - step) % order.ranks
    return piece_between(order, rank, source, query.shape[2], key.shape[2], setting.causal)
