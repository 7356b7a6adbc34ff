"""Ring attention: keys and values are exchanged in rounds (Liu et al., arXiv 2310.01889).

In round s a rank computes with the block of the rank that is s before it. Each block is sent by its
own rank: in round s to the rank that is s behind, the keys that this one attends to and no others.
So nothing is sent for empty blocks, and with a window only neighbours send. While a round computes,
the next round's block is received.

In backward the blocks are exchanged again, and the gradient of a block is returned to its rank in
the round after. Each rank divides the tiles of its own block: it computes the first half while the
first block is received, and the second while the last gradient returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

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
from plan_api.context_parallel.tiles import AttentionTile
from plan_api.runtime.error_context import annotate_backward_errors

__all__ = ["ring_attention"]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes attention over all ranks' keys.

    On N ranks each sends at most N-1 messages forward, and 2N-2 backward.

    Args:
        query: this rank's, (batch, heads, sequence, features).
        key: this rank's; its number of heads divides the queries'.
        value: this rank's, as the keys; it may have other features.
        call: the other arguments of the call.
        sinks: a score of each head for a key without a value, (heads); None: there is none.
    """
    out: torch.Tensor = _RingAttention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return out


class _Exchange:
    """Sends a tensor to a rank and receives one from another; either may be None.

    Args:
        send_buffer: is sent.
        to: the rank that receives it.
        receive_buffer: is received.
        source: the rank that sends it.
        call: the call, whose ranks these are.
    """

    def __init__(
        self,
        send_buffer: torch.Tensor | None,
        to: int,
        receive_buffer: torch.Tensor | None,
        source: int,
        call: AttentionCall,
    ) -> None:
        self._send_buffer, self._receive_buffer = send_buffer, receive_buffer
        group, ops = call.group, []
        if send_buffer is not None:
            ops.append(dist.P2POp(dist.isend, send_buffer, group=group, group_peer=to))
        if receive_buffer is not None:
            ops.append(dist.P2POp(dist.irecv, receive_buffer, group=group, group_peer=source))
        self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> torch.Tensor | None:
        """Returns the received tensor, when the other is sent too."""
        with record_function("ring: wait"):
            for work in self._works:
                work.wait()
        return self._receive_buffer


class _Rounds:
    """What a rank exchanges in each round.

    Args:
        key: this rank's.
        value: this rank's.
        call: the call.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> None:
        self._key, self._value, self._call = key, value, call
        self.count = call.ranks
        # In backward, the gradients of what is sent come back; so they are received where it is.
        self._sent = [call.block(self._after(step), call.rank).keys for step in range(self.count)]

    def _after(self, step: int) -> int:
        return (self._call.rank + step) % self.count

    def _before(self, step: int) -> int:
        return (self._call.rank - step) % self.count

    def own_block(self) -> Block:
        """Returns this rank's block."""
        call = self._call
        tiles, positions = call.block(call.rank, call.rank), call.keys.parts[call.rank]
        return Block(self._key, self._value, tiles, positions)

    def block(self, step: int, tensor: torch.Tensor | None) -> Block | None:
        """Returns the block that is received in a round; None: it is empty."""
        call, source = self._call, self._before(step)
        tiles = call.block(call.rank, source)
        if tensor is None or tiles.keys is None:
            return None
        key, value = self.split(tensor)
        return Block(key, value, tiles, call.keys.parts[source], tiles.keys.start)

    def split(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of a packed tensor, or of its gradient."""
        features = self._key.shape[-1]
        return packed[..., :features], packed[..., features:]

    def exchange(self, step: int) -> _Exchange | None:
        """Starts to exchange the blocks of a round; None: there is no such round."""
        if step >= self.count:
            return None
        keys = self._call.block(self._call.rank, self._before(step)).keys
        received = None if keys is None else self._empty(keys, self._key.dtype)
        sent = self._sent[step]
        part = None if sent is None else pack(self._key[:, :, sent], self._value[:, :, sent])
        return _Exchange(part, self._after(step), received, self._before(step), self._call)

    def exchange_grads(self, step: int, grad: torch.Tensor | None, dtype: torch.dtype) -> _Exchange:
        """Starts to return the gradient of a round's block, and to receive that of the own one."""
        sent = self._sent[step]
        received = None if sent is None else self._empty(sent, dtype)
        return _Exchange(grad, self._before(step), received, self._after(step), self._call)

    def add_grad(
        self, step: int, grad: torch.Tensor | None, grad_key: torch.Tensor, grad_value: torch.Tensor
    ) -> None:
        """Adds the gradient of what was sent in a round to those of the own block."""
        if grad is not None:
            for total, part in zip((grad_key, grad_value), self.split(grad), strict=True):
                total[:, :, self._sent[step]] += part

    def _empty(self, keys: slice, dtype: torch.dtype) -> torch.Tensor:
        """Returns a buffer for packed keys and values."""
        features = self._key.shape[-1] + self._value.shape[-1]
        shape = (*self._key.shape[:2], keys.stop - keys.start, features)
        return torch.empty(shape, dtype=dtype, device=self._key.device)


class _RingAttention(torch.autograd.Function):
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
        rounds = _Rounds(key, value, call)
        block: Block | None = rounds.own_block()
        for step in range(rounds.count):
            exchange = rounds.exchange(step + 1)
            if block is not None:
                with record_function("ring: compute"):
                    attention.add(block)
            if exchange is not None:
                block = rounds.block(step + 1, exchange.wait())
        output = attention.result(sinks)
        ctx.save_for_backward(attention.query, key, value, sinks, output.out, output.lse)
        ctx.call, ctx.masks, ctx.at = call, masks, call.backward_context
        ctx.kernels = attention.kernels
        return output.out

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        output = AttentionOutput(out, lse)
        attention = BlockBackward(grads[0], query, output, ctx.kernels, ctx.call, ctx.masks)
        rounds = _Rounds(key, value, ctx.call)
        dtype = accumulation_dtype(query.dtype)
        own = rounds.own_block()
        grad_own = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
        before, after = _halves(attention.tiles(own), rounds.count)
        exchange, returned = rounds.exchange(1), None
        with record_function("ring: compute"):
            attention.add(own, *grad_own, tiles=before)
        for step in range(1, rounds.count):
            assert exchange is not None
            received = exchange.wait()
            block = rounds.block(step, received)
            exchange = rounds.exchange(step + 1)
            grad_block = None
            if block is not None and received is not None:
                grad_block = torch.zeros_like(received, dtype=dtype)
                with record_function("ring: compute"):
                    attention.add(block, *rounds.split(grad_block))
            if returned is not None:
                rounds.add_grad(step - 1, returned.wait(), *grad_own)
            returned = rounds.exchange_grads(step, grad_block, dtype)
        with record_function("ring: compute"):
            attention.add(own, *grad_own, tiles=after)
        if returned is not None:
            rounds.add_grad(rounds.count - 1, returned.wait(), *grad_own)
        return (
            attention.grad_query.to(query.dtype), grad_own[0].to(key.dtype),
            grad_own[1].to(value.dtype), sinks_grad(grads[0], output, sinks), None,
        )  # fmt: skip


def _halves(
    tiles: Sequence[AttentionTile], ranks: int
) -> tuple[Sequence[AttentionTile], Sequence[AttentionTile]]:
    """Divides tiles into two parts of about as many products; on one rank the first has all."""
    rest = sum(tile.products for tile in tiles) / 2
    for number, tile in enumerate(tiles):
        if ranks > 1 and rest <= 0:
            return tiles[:number], tiles[number:]
        ranges = math.ceil(rest * tile.count / tile.products)
        if ranks > 1 and ranges < tile.count:
            before, after = tile.split(ranges)
            return (*tiles[:number], before), (after, *tiles[number + 1 :])
        rest -= tile.products
    return tiles, ()
