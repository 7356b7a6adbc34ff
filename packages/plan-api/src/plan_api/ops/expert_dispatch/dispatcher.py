"""The hooks of a module whose tokens are dispatched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import ExpertIndices, TokenDispatch
from plan_api.ops.expert_dispatch.functions import (
    DispatchCall,
    DispatchChunk,
    ReceivedRows,
    combine_rows,
    dispatch_rows,
    receive_rows,
    return_rows,
)
from plan_api.ops.expert_dispatch.overlapped import OverlappedModule
from plan_api.ops.expert_dispatch.rows import ExchangeGroup, RowFormat, Transfer
from plan_api.runtime.error_context import StepContext
from plan_api.runtime.hooks import get_argument, replace_argument

__all__ = ["TokenDispatcher"]

_NO_EXPERT = -1  # in rows, where a choice is dropped


@dataclass(frozen=True)
class _Running:
    """A call between the module's hooks.

    Attributes:
        call: the call.
        tokens: of each chunk, see `dispatch_rows`.
        links: of each chunk, see `dispatch_rows`.
        arguments: of the module, positional and by name, as they were given.
        first: what the module runs on between the hooks.
    """

    call: DispatchCall
    tokens: Sequence[torch.Tensor]
    links: Sequence[torch.Tensor]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    first: ReceivedRows


class TokenDispatcher:
    """Hooks of a module on plain tensors whose tokens are dispatched.

    Args:
        dispatch: of the module.
        indices: of the argument with the choices.
        mesh: of the plan; all its ranks have to construct this.
        path: of the module, for messages.
        overlapped: runs while results are sent; None: nothing does.
        drops_zeros: whether choices with a weight of zero are not sent, as their results and
            gradients are zero: those of routers that are limited to a capacity.
    """

    def __init__(
        self,
        dispatch: TokenDispatch,
        indices: ExpertIndices,
        mesh: DeviceMesh,
        path: str,
        overlapped: OverlappedModule | None = None,
        *,
        drops_zeros: bool = False,
    ) -> None:
        self._dispatch, self._path, self._overlapped = dispatch, path, overlapped
        self._index, self._own = indices.argument, indices.own
        self._slots = [dispatch.tokens, indices.argument]
        self._slots += [dispatch.weights] if dispatch.weights is not None else []
        self._drops_zeros = drops_zeros and dispatch.weights is not None
        self._group = ExchangeGroup.along(indices.axes, mesh, dispatch.step)
        self._at = StepContext(f"the backward of {path}", dispatch.step)
        self._running: _Running | None = None

    def dispatch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces the module's tokens by those that chose this rank's experts, sorted by expert.

        Of several chunks these are the first one's; `combine` runs the module on the others.

        Raises:
            ValueError: an argument is missing or has another shape; or, on all ranks of the group,
                one of them has a choice of which there is no expert.
        """
        given = [self._argument(slot, args, kwargs) for slot in self._slots]
        self._check_shapes(given)
        with torch.no_grad():
            call, tokens, rows = self._route(given)
        links = dispatch_rows(call, tokens, rows, given)
        first = receive_rows(call, call.chunks[0], links[0])
        self._running = _Running(call, tokens, links, (args, kwargs), first)
        return self._replaced(args, kwargs, first)

    def combine(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Replaces the module's output by one row for each of this rank's tokens.

        Raises:
            ValueError: the module returned another number of rows than it got.
        """
        running, self._running = self._running, None
        if running is None or output is None:  # the module has raised
            return None
        call, received, returned = running.call, running.first, []
        for at, (chunk, link) in enumerate(zip(call.chunks, running.links, strict=True)):
            if at:
                received = receive_rows(call, chunk, link)
                args, kwargs = self._replaced(*running.arguments, received)
                output = module.forward(*args, **kwargs)
            self._check_output(output, chunk)
            # Without tokens the parameters get zero gradients, not none, as on the other ranks.
            unused = [] if len(output) else _params(module)
            returned.append(return_rows(call, chunk, output, received, unused))
        if self._overlapped is not None:
            self._overlapped.run()
        return combine_rows(call, running.tokens, returned)

    def _replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], received: ReceivedRows
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the module's arguments for a chunk."""
        tokens, experts, *weights = received.arguments
        experts = experts.to(get_argument(self._index, args, kwargs).dtype)
        for slot, argument in zip(self._slots, (tokens, experts, *weights), strict=True):
            args, kwargs = replace_argument(slot, args, kwargs, argument)
        return args, kwargs

    def _argument(
        self, slot: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        found = get_argument(slot, args, kwargs)
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{self._path}: to dispatch tokens expected a tensor as {slot[1] or slot[0]}, got "
                f"{found!r}"
            )
        return found

    def _check_shapes(self, given: Sequence[torch.Tensor]) -> None:
        tokens, index, *weights = given
        if tokens.ndim != 2 or index.ndim != 2 or len(index) != len(tokens):
            raise ValueError(
                f"{self._path}: to dispatch tokens expected {self._dispatch.tokens[1]} of (tokens, "
                f"features) and {self._index[1]} of (tokens, choices), got {tuple(tokens.shape)} "
                f"and {tuple(index.shape)}"
            )
        if any(one.shape != index.shape for one in weights):
            raise ValueError(
                f"{self._path}: to dispatch tokens expected a weight for each choice, of "
                f"{tuple(index.shape)}, got {tuple(weights[0].shape)}"
            )

    def _check_output(self, output: Any, chunk: DispatchChunk) -> None:
        if not isinstance(output, torch.Tensor) or len(output) != chunk.assignments:
            what = f"{type(output).__name__} of {tuple(getattr(output, 'shape', ()))}"
            raise ValueError(
                f"{self._path}: to combine tokens expected a tensor with a row for each of "
                f"{chunk.assignments} tokens, got a {what}"
            )

    def _route(
        self, given: Sequence[torch.Tensor]
    ) -> tuple[DispatchCall, list[torch.Tensor], torch.Tensor]:
        """Exchanges the numbers of rows and assignments, and joins tokens to rows meanwhile.

        Returns:
            the call; the token of each row that is sent, by chunk; and a row for each token.
        """
        tokens, index, *weights = given
        ranks, number = len(self._dispatch.experts), self._dispatch.chunks
        starts = [len(tokens) * chunk // number for chunk in range(number + 1)]
        dropped = weights[0] == 0 if self._drops_zeros else None
        choices, counts = self._count(index, dropped, starts)
        in_flight = self._group.start(counts, [1] * ranks, [1] * ranks)
        sent_index = index.to(torch.int32)
        if dropped is not None:
            sent_index = sent_index.masked_fill(dropped, _NO_EXPERT)
        parts = [tokens, sent_index, *weights]
        row_format = RowFormat.of(parts)
        rows = row_format.join(parts)
        most = min(ranks, index.shape[1])  # rows of a token
        sent_tokens = [
            torch.nonzero_static(choices[:, start:end], size=most * (end - start))[:, 1] + start
            for start, end in itertools.pairwise(starts)
        ]
        sent_counts, received_counts = self._read(
            torch.stack([counts, self._group.wait(in_flight)]), index, starts
        )
        if any(count < 0 for count, *_ in (*sent_counts, *received_counts)):
            self._refuse_choices(index, [count for count, *_ in received_counts])
        chunks = []
        for at in range(number):
            sent = [of_rank[2 * at] for of_rank in sent_counts]
            from_ranks = [of_rank[2 * at] for of_rank in received_counts]
            assignments = sum(of_rank[2 * at + 1] for of_rank in received_counts)
            sent_tokens[at] = sent_tokens[at][: sum(sent)]
            dispatch = Transfer(sent, from_ranks, self._group)
            combine = Transfer(from_ranks, sent, self._group)
            chunks.append(DispatchChunk(dispatch, combine, sum(from_ranks), assignments))
        differentiable = [at for at, one in enumerate(given) if one.requires_grad]
        gradients = RowFormat.of([given[at] for at in differentiable])
        return (
            DispatchCall(
                chunks, len(tokens), self._own, row_format, differentiable, gradients, self._at
            ),
            sent_tokens,
            rows,
        )

    def _read(
        self, counts: torch.Tensor, index: torch.Tensor, starts: Sequence[int]
    ) -> list[list[list[int]]]:
        """Returns the numbers that are sent and received, for which the host waits."""
        if not isinstance(counts, FakeTensor):
            numbers: list[list[list[int]]] = counts.tolist()
            return numbers
        # As if all tokens chose experts of their own rank.
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        own = [number for size in sizes for number in (size, size * index.shape[1])]
        others = [0] * len(own)
        return [[own if part == self._own else others for part in self._dispatch.experts]] * 2

    def _count(
        self, index: torch.Tensor, dropped: torch.Tensor | None, starts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns how many experts of each rank tokens chose, and the numbers that are exchanged.

        Args:
            index: (tokens, choices).
            dropped: which choices do not count, as bools; None: all do.
            starts: the first token of each chunk, and the number of tokens.

        Returns:
            (ranks, tokens), int64; and (ranks, 2 chunks), int64: the rows and the assignments of
            each chunk, or -1 if there is a choice of which there is no expert.
        """
        experts = self._dispatch.experts
        firsts = index.new_tensor([part.start for part in experts[1:]])
        ranks = torch.bucketize(index, firsts, right=True).t()  # (choices, tokens)
        counted = torch.ones_like(ranks) if dropped is None else (~dropped).t().to(ranks.dtype)
        choices = index.new_zeros(len(experts), len(index), dtype=torch.int64)
        choices.scatter_add_(0, ranks, counted)
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        counts = [
            count for part in choices.split(sizes, 1) for count in ((part > 0).sum(1), part.sum(1))
        ]
        exist = ((index >= 0) & (index < experts[-1].stop)).all()
        return choices, torch.where(exist, torch.stack(counts, 1), -1)

    def _refuse_choices(self, index: torch.Tensor, received: Sequence[int]) -> None:
        number = self._dispatch.experts[-1].stop
        expected = f"expected choices from 0 to {number - 1} as {self._index[1]}"
        if bool(((index < 0) | (index >= number)).any()):
            low, high = int(index.min()), int(index.max())
            raise ValueError(f"{self._path}: {expected}, got choices from {low} to {high}")
        ranks = [rank for rank, count in enumerate(received) if count < 0]
        raise ValueError(f"{self._path}: {expected}, got others on ranks {ranks} of the group")


def _params(module: nn.Module) -> list[torch.Tensor]:
    """Returns the parameters as the running module and its submodules have them: local tensors."""
    return [getattr(owner, name) for owner in module.modules() for name in (*owner._parameters,)]
