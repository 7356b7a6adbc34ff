"""Ulysses attention: an all-to-all shards heads in place of the sequence (arXiv 2309.14509).

Queries, keys and values go from a shard of the sequence and all heads to the full sequence and a
shard of the heads, and the output goes back: four all-to-alls forward, and four backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Shard

from plan_api.context_parallel.order import AttentionCall
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution

__all__ = ["check_heads", "ulysses_attention"]

_HEADS, _SEQUENCE = 1, 2


def ulysses_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Computes attention over all ranks' keys.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its number of heads divides the queries'.
        value: this rank's, of the shape of the keys; it may have another number of features.
        call: the other arguments of the call; in contiguous order.

    Raises:
        ValueError: the axis does not divide the number of heads; nothing has been sent.
    """
    for what, heads in (("heads", query.shape[_HEADS]), ("key-value heads", key.shape[_HEADS])):
        check_heads(what, heads, call)
    mesh, axis, where, at = call.mesh, call.axis, call.where, call.backward_context
    to_heads = local_redistribution(Shard(_SEQUENCE), Shard(_HEADS), mesh, axis, where)
    to_sequence = local_redistribution(Shard(_HEADS), Shard(_SEQUENCE), mesh, axis, where)
    query, key, value = (_all_to_all(one, to_heads, to_sequence, at) for one in (query, key, value))
    out = torch._C._nn.scaled_dot_product_attention(
        query, key, value, is_causal=call.causal, scale=call.scale,
        enable_gqa=key.shape[_HEADS] != query.shape[_HEADS],
    )  # fmt: skip
    return _all_to_all(out, to_sequence, to_heads, at)


def check_heads(what: str, heads: int, call: AttentionCall) -> None:
    """Checks that the ranks divide a number of heads."""
    if heads % call.order.ranks:
        axis = (call.mesh.mesh_dim_names or range(call.mesh.ndim))[call.axis]
        raise ValueError(
            f"{call.where}: expected a number of {what} on this rank that axis {axis!r} of size "
            f"{call.order.ranks} divides, as method='ulysses' shards heads, got {heads}; use "
            f"method='ring' or 'all-gather'"
        )


def _all_to_all(
    tensor: torch.Tensor,
    forward: LocalRedistribution,
    backward: LocalRedistribution,
    at: StepContext | None,
) -> torch.Tensor:
    result: torch.Tensor = _AllToAll.apply(tensor, forward, backward, at)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        forward: LocalRedistribution,
        backward: LocalRedistribution,
        at: StepContext | None,
    ) -> torch.Tensor:
        ctx.gradient_move, ctx.at = backward, at
        return forward(tensor)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.gradient_move(grads[0]), None, None, None
