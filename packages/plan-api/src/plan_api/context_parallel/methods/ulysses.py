"""Ulysses attention: an all-to-all shards heads in place of the sequence (arXiv 2309.14509).

Queries, keys and values go from a shard of the sequence and all heads to the full sequence and a
shard of the heads, and the output goes back: four all-to-alls forward, and four backward. Where
another axis shards the sequence too, they go to the tokens of all ranks of this axis, and attention
over the others is a ring (USP, arXiv 2405.07719): heads within a host, the ring across. The ring
computes tokens in ascending order, in which those of several ranks are put after the all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from plan_api.context_parallel.call import AttentionCall
from plan_api.context_parallel.methods.ring import ring_attention
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
            runs along ``axis``; if there is no ``ulysses_axis``, heads along ``axis``.
        sinks: a score of each head for a key without a value, (heads); None: there is none.

    Raises:
        ValueError: the axis does not divide the number of heads; nothing has been sent.
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
        order=call.order.grouped(ranks),
        key_order=None if call.key_order is None else call.key_order.grouped(ranks),
    )
    each = query.shape[_HEADS] // ranks
    own = slice(rank * each, (rank + 1) * each)
    if call.dropout is not None:
        inner = replace(inner, dropout=call.dropout.of_heads(own.start, own.stop))
    of_queries, of_keys = (
        _Exchange(
            local_redistribution(Shard(_SEQUENCE), Shard(_HEADS), mesh, axis, where),
            local_redistribution(Shard(_HEADS), Shard(_SEQUENCE), mesh, axis, where),
            order.ascending(ranks, inner.rank, query.device),
            at,
        )
        for order in (call.order, call.keys)
    )
    query, key, value = of_queries(query), of_keys(key), of_keys(value)
    if _torch_can(inner) and sinks is None:
        out = torch._C._nn.scaled_dot_product_attention(
            query, key, value, is_causal=call.mask.causal, scale=call.scale,
            enable_gqa=key.shape[_HEADS] != query.shape[_HEADS],
        )  # fmt: skip
    else:
        out = ring_attention(query, key, value, inner, None if sinks is None else sinks[own])
    return of_queries.reversed()(out)


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


@dataclass(frozen=True)
class _Exchange:
    """Shards heads in place of the sequence, or back, and gradients the other way.

    Attributes:
        to_heads: the all-to-all of the shards.
        to_sequence: the one back.
        ascending: where the tokens of an ascending order are after the all-to-all; None: they are
            in order.
        at: the step of the plan, for errors in backward; None: there is no plan.
        is_reversed: whether it goes back.
    """

    to_heads: LocalRedistribution
    to_sequence: LocalRedistribution
    ascending: torch.Tensor | None
    at: StepContext | None
    is_reversed: bool = False

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the exchanged tensor, for autograd."""
        result: torch.Tensor = _AllToAll.apply(tensor, self)  # type: ignore[no-untyped-call]
        return result

    def reversed(self) -> _Exchange:
        """Returns the exchange back."""
        return replace(self, is_reversed=not self.is_reversed)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the exchanged tensor."""
        if not self.is_reversed:
            tensor = self.to_heads(tensor)
            if self.ascending is not None:
                tensor = tensor.index_select(_SEQUENCE, self.ascending)
            return tensor
        if self.ascending is not None:
            tensor = tensor.index_select(_SEQUENCE, self.ascending.argsort())
        return self.to_sequence(tensor)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, exchange: _Exchange) -> torch.Tensor:
        ctx.exchange, ctx.at = exchange, exchange.at
        return exchange.move(tensor)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return ctx.exchange.reversed().move(grads[0]), None
