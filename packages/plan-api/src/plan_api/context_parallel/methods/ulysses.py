"""Ulysses attention: an all-to-all shards heads in place of the sequence (arXiv 2309.14509).

Queries, keys and values go from a shard of the sequence and all heads to the full sequence and a
shard of the heads, and the output goes back: four all-to-alls forward, and four backward. Where
another axis shards the sequence too, they go to the tokens of all ranks of this axis, and attention
over the others is a ring (USP, arXiv 2405.07719): heads within a host, the ring across.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.methods.ring import ring_attention
from plan_api.context_parallel.order import TokenOrder
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.runtime.local_redistribute import LocalRedistribution, local_redistribution

__all__ = ["check_heads", "ulysses_attention"]

_HEADS, _SEQUENCE = 1, 2


def ulysses_attention(
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
        call: the other arguments of the call; heads are sharded along ``ulysses_axis``, and a ring
            runs along ``axis``; if there is no ``ulysses_axis``, heads along ``axis``. The tokens
            of the ranks for which heads are sharded are in ascending order.
        sinks: a score of each head for a key without a value, (heads); None: there is none.

    Raises:
        ValueError: the axis does not divide the number of heads, or the tokens are in another
            order; nothing has been sent.
    """
    axis = call.axis if call.ulysses_axis is None else call.ulysses_axis
    assert axis is not None
    call.check(query, key)
    for what, heads in (("heads", query.shape[_HEADS]), ("key-value heads", key.shape[_HEADS])):
        check_heads(what, heads, call)
    mesh, where, at = call.mesh, call.where, call.backward_context
    ranks, rank = mesh.size(axis), mesh.get_local_rank(axis)
    inner = replace(
        call,
        axis=None if call.ulysses_axis is None else call.axis,
        ulysses_axis=None,
        order=_grouped(call, call.order, ranks),
        key_order=None if call.key_order is None else _grouped(call, call.key_order, ranks),
    )
    each = query.shape[_HEADS] // ranks
    own = slice(rank * each, (rank + 1) * each)
    if call.dropout is not None:
        inner = replace(inner, dropout=call.dropout.of_heads(own.start, own.stop))
    to_heads = local_redistribution(Shard(_SEQUENCE), Shard(_HEADS), mesh, axis, where)
    to_sequence = local_redistribution(Shard(_HEADS), Shard(_SEQUENCE), mesh, axis, where)
    query, key, value = (_all_to_all(one, to_heads, to_sequence, at) for one in (query, key, value))
    if _torch_can(inner) and sinks is None:
        out = torch._C._nn.scaled_dot_product_attention(
            query, key, value, is_causal=call.mask.causal, scale=call.scale,
            enable_gqa=key.shape[_HEADS] != query.shape[_HEADS],
        )  # fmt: skip
    else:
        out = ring_attention(query, key, value, inner, None if sinks is None else sinks[own])
    return _all_to_all(out, to_sequence, to_heads, at)


def _torch_can(call: AttentionCall) -> bool:
    """Whether torch's attention computes the call, all of whose tokens are on this rank."""
    no_padding = call.keys.padded_length == call.keys.length
    return (
        call.axis is None
        and call.mask.is_plain
        and call.dropout is None
        # Causal attention has padding behind all tokens, which attend to none of it.
        and (no_padding or call.mask.causal)
    )


def _grouped(call: AttentionCall, order: TokenOrder, ranks: int) -> TokenOrder:
    """Returns the order of the ranks' tokens together."""
    try:
        return order.grouped(ranks)
    except ValueError:
        raise ValueError(
            f"{call.where}: expected the tokens of {ranks} consecutive ranks in ascending order, "
            f"as method='ulysses' puts them together, got {order.parts[:ranks]}; use "
            f"order='contiguous', or method='ring' or 'all-gather'"
        ) from None


def check_heads(what: str, heads: int, call: AttentionCall) -> None:
    """Checks that the ranks divide a number of heads."""
    axis = call.axis if call.ulysses_axis is None else call.ulysses_axis
    assert axis is not None
    if heads % call.mesh.size(axis):
        name = (call.mesh.mesh_dim_names or range(call.mesh.ndim))[axis]
        raise ValueError(
            f"{call.where}: expected a number of {what} on this rank that axis {name!r} of size "
            f"{call.mesh.size(axis)} divides, as method='ulysses' shards heads, got {heads}; use "
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
