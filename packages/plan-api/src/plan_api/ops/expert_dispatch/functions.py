"""The autograd functions of a dispatch, see the note in `plan_api.ops.expert_dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plan_api.ops.expert_dispatch.rows import RowFormat, Transfer
from plan_api.runtime.error_context import StepContext, annotate_backward_errors

__all__ = [
    "AUTOGRAD_FUNCTIONS", "DispatchCall", "DispatchChunk", "combine_rows", "dispatch_rows",
    "receive_rows", "return_rows",
]  # fmt: skip


@dataclass(frozen=True)
class DispatchChunk:
    """Some of a call's tokens.

    Attributes:
        dispatch: of the rows.
        combine: of the sums of their results.
        rows: how many this rank receives.
        assignments: how many this rank's experts get.
    """

    dispatch: Transfer
    combine: Transfer
    rows: int
    assignments: int


@dataclass(frozen=True)
class DispatchCall:
    """What the functions of a call share.

    Attributes:
        chunks: of its tokens.
        tokens: how many this rank has.
        own: the expert numbers of this rank.
        format: of the rows: tokens, choices and weights.
        differentiable: which of these have gradients.
        gradients: the format of the rows of gradients.
        at: for messages of backward.
    """

    chunks: Sequence[DispatchChunk]
    tokens: int
    own: range
    format: RowFormat
    differentiable: Sequence[int]
    gradients: RowFormat
    at: StepContext


@dataclass(frozen=True)
class ReceivedRows:
    """What a module runs on for one chunk.

    Attributes:
        arguments: the tokens (assignments, features), their experts (assignments, 1), and their
            weights (assignments, 1) if there are any.
        rows: (assignments,), int64: the received row of each.
        link: to pass on, see `dispatch_rows`.
    """

    arguments: list[torch.Tensor]
    rows: torch.Tensor
    link: torch.Tensor


def dispatch_rows(
    call: DispatchCall,
    tokens: Sequence[torch.Tensor],
    rows: torch.Tensor,
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Starts to send the rows of all chunks; in backward receives their gradients.

    Args:
        call: the call.
        tokens: of each chunk (rows sent,), int64: the token of each row, sorted by rank.
        rows: (tokens, bytes): one of each token.
        given: the tokens, choices and weights that are in them.

    Returns:
        an empty tensor for each chunk. They link the functions of a chunk, as inputs and outputs of
        all of them, so that the backward of each runs on all ranks, also where the module got no
        rows and its output does not depend on them.
    """
    return list(_DispatchRows.apply(call, tokens, rows, *given))  # type: ignore[no-untyped-call]


def receive_rows(call: DispatchCall, chunk: DispatchChunk, link: torch.Tensor) -> ReceivedRows:
    """Waits for a chunk's rows, and sorts their assignments by expert."""
    *arguments, rows, link = _ReceiveRows.apply(call, chunk, link)  # type: ignore[no-untyped-call]
    return ReceivedRows(arguments, rows, link)


def return_rows(
    call: DispatchCall,
    chunk: DispatchChunk,
    output: torch.Tensor,
    received: ReceivedRows,
    unused: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Starts to send a chunk's results back, those of a row summed.

    Args:
        call: the call.
        chunk: of its tokens.
        output: (assignments, ...), of the module.
        received: what the module ran on.
        unused: tensors that get gradients of zero.

    Returns:
        the link.
    """
    returned: torch.Tensor = _ReturnRows.apply(  # type: ignore[no-untyped-call]
        call, chunk, output, received.rows, received.link, *unused
    )
    return returned


def combine_rows(
    call: DispatchCall, tokens: Sequence[torch.Tensor], links: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Waits for the results of all chunks; returns (tokens, ...), the sums of those of a token."""
    combined: torch.Tensor = _CombineRows.apply(call, tokens, *links)  # type: ignore[no-untyped-call]
    return combined


class _DispatchRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: DispatchCall,
        tokens: Sequence[torch.Tensor],
        rows: torch.Tensor,
        *given: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.call, ctx.at, ctx.given = call, call.at, len(given)
        ctx.save_for_backward(*tokens)
        for chunk, of_chunk in zip(call.chunks, tokens, strict=True):
            chunk.dispatch.send(rows.index_select(0, of_chunk))
        return tuple(given[0].new_empty(0) for _ in call.chunks)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        call, tokens = ctx.call, ctx.saved_tensors
        parts = [call.gradients.split(chunk.dispatch.receive()) for chunk in reversed(call.chunks)][
            ::-1
        ]
        found: list[torch.Tensor | None] = [None] * ctx.given
        for at, *of_chunks in zip(call.differentiable, *parts, strict=True):
            found[at] = _sum_rows(of_chunks, tokens, call.tokens)
        return None, None, None, *found


class _ReceiveRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: DispatchCall, chunk: DispatchChunk, link: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        tokens, index, *weights = call.format.split(chunk.dispatch.receive())
        ctx.call, ctx.chunk, ctx.at, ctx.choices = call, chunk, call.at, index.shape[1]
        local, number = index.flatten() - call.own.start, len(call.own)
        # Choices of other ranks' experts are behind all others.
        local = torch.where((local >= 0) & (local < number), local, number)
        experts, order = (one[: chunk.assignments] for one in local.sort(stable=True))
        rows = order // index.shape[1]
        ctx.save_for_backward(rows, order)
        ctx.mark_non_differentiable(experts, rows)
        arguments = [tokens.index_select(0, rows), experts.unsqueeze(1)]
        arguments += [one.flatten().index_select(0, order).unsqueeze(1) for one in weights]
        return *arguments, rows, link.new_empty(0)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        rows, order = ctx.saved_tensors
        call, number = ctx.call, ctx.chunk.rows
        parts = []
        for at in call.differentiable:
            if at == 0:
                parts.append(_sum_rows([grads[at]], [rows], number))
            else:
                found = grads[at].new_zeros(number * ctx.choices)
                found.index_copy_(0, order, grads[at].flatten())
                parts.append(found.view(number, ctx.choices))
        ctx.chunk.dispatch.send_back(call.gradients.join(parts))
        return None, None, grads[-1]


class _ReturnRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: DispatchCall,
        chunk: DispatchChunk,
        output: torch.Tensor,
        rows: torch.Tensor,
        link: torch.Tensor,
        *unused: torch.Tensor,
    ) -> torch.Tensor:
        ctx.chunk, ctx.at, ctx.unused = chunk, call.at, unused
        ctx.save_for_backward(rows)
        chunk.combine.send(_sum_rows([output], [rows], chunk.rows))
        return link.new_empty(0)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        grad = ctx.chunk.combine.receive().index_select(0, rows)
        zeros = (torch.zeros_like(one) if one.requires_grad else None for one in ctx.unused)
        return None, None, grad, None, grads[0], *zeros


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: DispatchCall, tokens: Sequence[torch.Tensor], *links: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.at = call, call.at
        ctx.save_for_backward(*tokens)
        return _sum_rows([chunk.combine.receive() for chunk in call.chunks], tokens, call.tokens)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        tokens = ctx.saved_tensors
        for chunk, of_chunk in reversed([*zip(ctx.call.chunks, tokens, strict=True)]):
            chunk.combine.send_back(grads[0].index_select(0, of_chunk))
        return None, None, *(grads[0].new_zeros(0) for _ in tokens)


AUTOGRAD_FUNCTIONS = (_DispatchRows, _ReceiveRows, _ReturnRows, _CombineRows)


def _sum_rows(
    parts: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], number: int
) -> torch.Tensor:
    """Returns (number, ...): the sums of rows of one index, in float32 if rows have 16 bits."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    sums = parts[0].new_zeros(number, *parts[0].shape[1:], dtype=wide)
    for part, index in zip(parts, indices, strict=True):
        sums.index_add_(0, index, part.to(wide).contiguous())  # of views it takes long
    return sums.to(dtype)
