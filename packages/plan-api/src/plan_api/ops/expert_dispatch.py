"""Dispatches tokens to the ranks of the experts that they chose, and combines the results.

Note: a *row* is a token that is sent to a rank, with all its choices and weights: one for each rank
that has some of the experts that it chose. An *assignment* is a token and one of these experts. One
all-to-all exchanges the numbers of rows and of assignments, a second one dispatches the rows, whose
assignments the receiving rank sorts by expert; when the module has run on those, the results of a
row are summed and a third one returns them, which are summed over the ranks. No token is dropped
or padded: splits are uneven. Backward runs the second and the third in reverse.

All ranks call all of these collectives: a rank that receives no row runs its module on no tokens.

Source: GShard, section 3.2 (https://arxiv.org/abs/2006.16668), without its capacity; MegaBlocks
(https://arxiv.org/abs/2211.15841); one row for each rank: DeepSeek-V3, section 3.2.2
(https://arxiv.org/abs/2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from plan_api.lowering.ir import ExpertIndices, SiteStep, TokenDispatch
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.runtime.hooks import get_argument, replace_argument
from plan_api.spec.axes import axis_names

__all__ = ["AUTOGRAD_FUNCTIONS", "TokenDispatcher"]


@dataclass(frozen=True)
class _Exchange:
    """An all-to-all of rows with uneven splits.

    Attributes:
        sent: rows for each rank.
        received: rows from each rank.
        group: the name of the process group.
        step: of the plan.
        at: the same, for messages of backward.
    """

    sent: Sequence[int]
    received: Sequence[int]
    group: str
    step: SiteStep
    at: StepContext

    def run(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sends rows of tensors (rows, ...), joined to one; returns those that are received."""
        with moving(self.step, (), ()):
            rows = _all_to_all(_join(parts), self.received, self.sent, self.group)
        return _split(rows, parts)

    def reverse(self) -> _Exchange:
        """Returns the exchange that sends received rows back."""
        return replace(self, sent=self.received, received=self.sent)

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return f"plan-api: tokens sent to the ranks of their experts, {self.step.description}"


@dataclass(frozen=True)
class _Route:
    """Where the tokens of one call are sent.

    Attributes:
        exchange: of the rows.
        tokens: (rows sent,), int64: the token of each row, sorted by rank.
        assignments: how many this rank's experts get.
    """

    exchange: _Exchange
    tokens: torch.Tensor
    assignments: int


@dataclass(frozen=True)
class _Running:
    """A call between the module's hooks.

    Attributes:
        route: of its tokens.
        tokens: how many this rank has.
        rows: (assignments,), int64: the received row of each.
        link: see `_ExchangeRows`.
    """

    route: _Route
    tokens: int
    rows: torch.Tensor
    link: torch.Tensor


class TokenDispatcher:
    """Hooks of a module on plain tensors whose tokens are dispatched.

    Args:
        dispatch: of the module.
        indices: of the argument with the choices.
        mesh: of the plan; all its ranks have to construct this.
        path: of the module, for messages.
    """

    def __init__(
        self, dispatch: TokenDispatch, indices: ExpertIndices, mesh: DeviceMesh, path: str
    ) -> None:
        self._dispatch, self._path = dispatch, path
        self._index, self._own = indices.argument, indices.own
        self._group = _group_of(mesh, indices.axes)
        self._at = StepContext(f"the backward of {path}", dispatch.step)
        self._running: _Running | None = None

    def dispatch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces the module's tokens by those that chose this rank's experts, sorted by expert.

        Raises:
            ValueError: an argument is missing or has another shape; or, on all ranks of the group,
                one of them has a choice of which there is no expert.
        """
        slots = [self._dispatch.tokens, self._index]
        slots += [self._dispatch.weights] if self._dispatch.weights is not None else []
        given = [self._argument(slot, args, kwargs) for slot in slots]
        self._check_shapes(given)
        tokens, index, *_ = given
        route, dtype = self._route(index), index.dtype
        given[1] = index.to(torch.int32)
        *received, link = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
            route.exchange,
            tuple(one.requires_grad for one in given),
            *(one.index_select(0, route.tokens) for one in given),
        )
        experts, order = self._sort_by_expert(received[1], route.assignments)
        rows = order // index.shape[1]
        self._running = _Running(route, len(tokens), rows, link)
        arguments = [received[0].index_select(0, rows), experts.to(dtype).unsqueeze(1)]
        arguments += [
            weights.flatten().index_select(0, order).unsqueeze(1) for weights in received[2:]
        ]
        for slot, argument in zip(slots, arguments, strict=True):
            args, kwargs = replace_argument(slot, args, kwargs, argument)
        return args, kwargs

    def combine(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Replaces the module's output by one row for each of this rank's tokens.

        Raises:
            ValueError: the module returned another number of rows than it got.
        """
        running, self._running = self._running, None
        if running is None or output is None:  # the module has raised
            return None
        route, exchange = running.route, running.route.exchange
        if not isinstance(output, torch.Tensor) or len(output) != route.assignments:
            what = f"{type(output).__name__} of {tuple(getattr(output, 'shape', ()))}"
            raise ValueError(
                f"{self._path}: to combine tokens expected a tensor with a row for each of "
                f"{route.assignments} tokens, got a {what}"
            )
        # Without tokens the parameters get zero gradients, not none, as on the other ranks.
        unused = [] if len(output) else _params(module)
        sums = _sum_rows(output, running.rows, sum(exchange.received))
        rows, _ = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
            exchange.reverse(), (True,), sums, running.link, *unused
        )
        return _sum_rows(rows, route.tokens, running.tokens)

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

    def _route(self, index: torch.Tensor) -> _Route:
        """Exchanges the numbers of rows and assignments."""
        experts = self._dispatch.experts
        size, number = len(experts), experts[-1].stop
        firsts = index.new_tensor([part.start for part in experts[1:]])
        ranks = torch.bucketize(index, firsts, right=True).t()  # (choices, tokens)
        sends = index.new_zeros(size, len(index), dtype=torch.bool).scatter_(0, ranks, True)
        assignments = index.new_zeros(size, dtype=torch.int64)
        assignments.scatter_add_(0, ranks.flatten(), torch.ones_like(ranks).flatten())
        exist = ((index >= 0) & (index < number)).all()
        counts = torch.where(exist, torch.stack([sends.sum(1), assignments], 1), -1)
        with moving(self._dispatch.step, (), ()):
            received = _all_to_all(counts, [1] * size, [1] * size, self._group)
        sent_counts, received_counts = torch.stack([counts, received]).tolist()  # the host waits
        sent, _ = zip(*sent_counts, strict=True)
        from_ranks, numbers = zip(*received_counts, strict=True)
        if -1 in sent + from_ranks:
            self._refuse_choices(index, number, [*from_ranks])
        tokens = torch.nonzero_static(sends, size=sum(sent))[:, 1]
        exchange = _Exchange(sent, from_ranks, self._group, self._dispatch.step, self._at)
        return _Route(exchange, tokens, sum(numbers))

    def _refuse_choices(self, index: torch.Tensor, number: int, counts: list[int]) -> None:
        expected = f"expected choices from 0 to {number - 1} as {self._index[1]}"
        outside = index[(index < 0) | (index >= number)]
        if len(outside):
            low, high = int(index.min()), int(index.max())
            raise ValueError(f"{self._path}: {expected}, got choices from {low} to {high}")
        ranks = [rank for rank, count in enumerate(counts) if count < 0]
        raise ValueError(f"{self._path}: {expected}, got others on ranks {ranks} of the group")

    def _sort_by_expert(
        self, index: torch.Tensor, assignments: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's assignments in choices (rows, choices): their experts and places."""
        local, experts = index.flatten() - self._own.start, len(self._own)
        # Choices of other ranks' experts are behind all others.
        local = torch.where((local >= 0) & (local < experts), local, experts)
        sorted_experts, order = local.sort(stable=True)
        return sorted_experts[:assignments], order[:assignments]


class _ExchangeRows(torch.autograd.Function):
    """Exchanges rows of several tensors, and in backward the gradients of some of them.

    Its last output is empty. It links the functions of a call, as an input of the second one, so
    that the backward of both runs on all ranks, also where the module got no rows and its output
    does not depend on them. Inputs behind those that are sent get gradients of zero.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: _Exchange, differentiable: tuple[bool, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        parts, others = tensors[: len(differentiable)], tensors[len(differentiable) :]
        ctx.exchange, ctx.at, ctx.differentiable = exchange, exchange.at, differentiable
        ctx.others, ctx.empty = others, [part.new_empty(0, *part.shape[1:]) for part in parts]
        ctx.set_materialize_grads(False)
        received = exchange.run(parts)
        ctx.mark_non_differentiable(*(one for one in received if not one.is_floating_point()))
        return (*received, parts[0].new_empty(0))

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        found: list[torch.Tensor | None] = [None] * len(ctx.differentiable)
        places = [at for at, needed in enumerate(ctx.differentiable) if needed]
        if places:
            sent = [
                ctx.empty[at].new_zeros(sum(ctx.exchange.received), *ctx.empty[at].shape[1:])
                if grads[at] is None
                else grads[at]
                for at in places
            ]
            for at, grad in zip(places, ctx.exchange.reverse().run(sent), strict=True):
                found[at] = grad.contiguous()  # they are summed, for which views take long
        zeros = (torch.zeros_like(one) if one.requires_grad else None for one in ctx.others)
        return None, None, *found, *zeros


AUTOGRAD_FUNCTIONS = (_ExchangeRows,)


def _sum_rows(rows: torch.Tensor, index: torch.Tensor, number: int) -> torch.Tensor:
    """Returns (number, ...): the sums of rows of one index, in float32 if rows have 16 bits."""
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    sums = wide.new_zeros(number, *rows.shape[1:]).index_add(0, index, wide)
    return sums.to(rows.dtype)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns rows with the bytes of all parts' rows, the widest dtype first: all are aligned."""
    if len(parts) == 1:
        return parts[0]
    columns, width = _columns(parts)
    rows = parts[0].new_empty(len(parts[0]), width, dtype=torch.uint8)
    rows[:, max(place.stop for place in columns) :] = 0
    for part, place in zip(parts, columns, strict=True):
        rows[:, place].view(part.dtype).copy_(part)
    return rows


def _split(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns views of joined rows as parts; the other parts have their columns and dtypes."""
    if len(parts) == 1:
        return [rows]
    columns, _ = _columns(parts)
    return [rows[:, place].view(part.dtype) for part, place in zip(parts, columns, strict=True)]


def _columns(parts: Sequence[torch.Tensor]) -> tuple[list[slice], int]:
    """Returns the bytes of each part (rows, columns) in a joined row, and how many a row has."""
    places, end, widest = [slice(0)] * len(parts), 0, max(part.itemsize for part in parts)
    for at in sorted(range(len(parts)), key=lambda at: -parts[at].itemsize):
        start, end = end, end + parts[at].shape[1] * parts[at].itemsize
        places[at] = slice(start, end)
    return places, -(-end // widest) * widest


def _params(module: nn.Module) -> list[torch.Tensor]:
    """Returns the parameters as the running module and its submodules have them: local tensors."""
    return [getattr(owner, name) for owner in module.modules() for name in (*owner._parameters,)]


def _group_of(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    """Returns the name of the group of all ranks along axes, the first axis outermost."""
    if len(axes) == 1:
        return mesh.get_group(axes[0]).group_name
    names = axis_names(mesh)
    return mesh[tuple(names[axis] for axis in axes)]._flatten().get_group().group_name


def _all_to_all(
    rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    output = ops.all_to_all_single(rows.contiguous(), [*received], [*sent], group)
    return ops.wait_tensor(output)  # type: ignore[no-any-return]
