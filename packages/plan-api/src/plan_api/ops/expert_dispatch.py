"""Dispatches tokens to the ranks of the experts that they chose, and combines the results.

Note: an *assignment* is a token and one expert that it chose. On each rank assignments are sorted
by expert, and so by the rank that has it. One all-to-all exchanges the number of assignments per
expert, a second one dispatches their tokens, and when the module has run a third one returns the
results, which are weighted and summed. No token is dropped or padded: splits are uneven. Backward
runs the second and the third in reverse.

All ranks call all of these collectives: a rank that receives no token runs its module on no rows.

Source: GShard, section 3.2 (https://arxiv.org/abs/2006.16668), without its capacity; MegaBlocks
(https://arxiv.org/abs/2211.15841).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
class _Assignments:
    """The assignments of one call, and the splits of their all-to-all.

    Attributes:
        by_expert: (assignments,), int64: the permutation that sorts them by expert.
        by_token: (assignments,), int64: its inverse.
        sent: rows for each rank.
        received: rows from each rank.
        per_token: assignments of one token.
        group: the name of the process group.
        step: of the plan.
        at: the same, for messages of backward.
    """

    by_expert: torch.Tensor
    by_token: torch.Tensor
    sent: Sequence[int]
    received: Sequence[int]
    per_token: int
    group: str
    step: SiteStep
    at: StepContext

    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows, sorted by expert, to the experts' ranks."""
        with moving(self.step, (), ()):
            return _all_to_all(rows, self.received, self.sent, self.group)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends rows back to the tokens' ranks, where they are sorted by expert."""
        with moving(self.step, (), ()):
            return _all_to_all(rows, self.sent, self.received, self.group)

    def _waits_for_(self) -> str:
        """Describes what is waited for, for `fused_comm.diagnosis`."""
        return f"plan-api: tokens sent to the ranks of their experts, {self.step.description}"


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
        self._running: tuple[_Assignments, torch.Tensor, torch.Tensor | None] | None = None

    def dispatch(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces the module's tokens by those that chose this rank's experts.

        Raises:
            ValueError: an argument is missing or has another shape, or there is no such expert.
        """
        tokens = self._argument(self._dispatch.tokens, args, kwargs)
        index = self._argument(self._index, args, kwargs)
        weights = None
        if self._dispatch.weights is not None:
            weights = self._argument(self._dispatch.weights, args, kwargs)
        if tokens.ndim != 2 or index.ndim != 2 or len(index) != len(tokens):
            raise ValueError(
                f"{self._path}: to dispatch tokens expected {self._dispatch.tokens[1]} of (tokens, "
                f"features) and {self._index[1]} of (tokens, choices), got {tuple(tokens.shape)} "
                f"and {tuple(index.shape)}"
            )
        assignments, local_index = self._assign(index)
        needs_grad = tokens.requires_grad or any(param.requires_grad for param in _params(module))
        anchor = tokens.new_empty(0).requires_grad_(needs_grad and torch.is_grad_enabled())
        rows, link = _DispatchTokens.apply(tokens, anchor, assignments)  # type: ignore[no-untyped-call]
        self._running = assignments, link, weights
        args, kwargs = replace_argument(self._dispatch.tokens, args, kwargs, rows)
        args, kwargs = replace_argument(self._index, args, kwargs, local_index)
        if self._dispatch.weights is not None:
            assert weights is not None
            ones = torch.ones_like(local_index, dtype=weights.dtype)
            args, kwargs = replace_argument(self._dispatch.weights, args, kwargs, ones)
        return args, kwargs

    def combine(self, module: nn.Module, _: Any, output: Any) -> Any:
        """Replaces the module's output by one row for each of this rank's tokens.

        Raises:
            ValueError: the module returned another number of rows than it got.
        """
        running, self._running = self._running, None
        if running is None or output is None:  # the module has raised
            return None
        assignments, link, weights = running
        if not isinstance(output, torch.Tensor) or len(output) != sum(assignments.received):
            what = f"{type(output).__name__} of {tuple(getattr(output, 'shape', ()))}"
            raise ValueError(
                f"{self._path}: to combine tokens expected a tensor with a row for each of "
                f"{sum(assignments.received)} tokens, got a {what}"
            )
        # Without tokens the parameters get zero gradients, not none, as on the other ranks.
        unused = [] if len(output) else _params(module)
        rows = _CombineTokens.apply(output, link, assignments, *unused)  # type: ignore[no-untyped-call]
        rows = rows.view(-1, assignments.per_token, *output.shape[1:])
        if weights is not None:
            rows = rows * weights.view(*weights.shape, *[1] * (rows.ndim - 2))
        return rows.sum(1).to(output.dtype)

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

    def _assign(self, index: torch.Tensor) -> tuple[_Assignments, torch.Tensor]:
        """Returns the assignments of choices, and the received rows' local experts, (rows, 1)."""
        experts, own = self._dispatch.experts, self._own
        lengths, number = [len(part) for part in experts], experts[-1].stop
        chosen, by_expert = index.flatten().sort(stable=True)
        ends = torch.arange(number + 1, device=index.device, dtype=chosen.dtype)
        sent_counts = torch.searchsorted(chosen, ends).diff()  # assignments per expert
        with moving(self._dispatch.step, (), ()):
            received_counts = _all_to_all(
                sent_counts, [len(own)] * len(experts), lengths, self._group
            )
        counts = torch.cat([sent_counts, received_counts]).tolist()  # the only host sync
        if sum(counts[:number]) != len(by_expert):
            low, high = int(chosen[0]), int(chosen[-1])
            raise ValueError(
                f"{self._path}: expected choices from 0 to {number - 1} as {self._index[1]}, got "
                f"choices from {low} to {high}"
            )
        sent = [sum(counts[part.start : part.stop]) for part in experts]
        received = [
            sum(counts[number + rank * len(own) : number + (rank + 1) * len(own)])
            for rank in range(len(experts))
        ]
        local = torch.arange(len(own), device=index.device, dtype=index.dtype).repeat(len(experts))
        local_index = local.repeat_interleave(received_counts, output_size=sum(received))
        step = self._dispatch.step
        assignments = _Assignments(
            by_expert,
            by_expert.argsort(),
            sent,
            received,
            index.shape[1],
            self._group,
            step,
            StepContext(f"the backward of {self._path}", step),
        )
        return assignments, local_index.unsqueeze(1)


class _DispatchTokens(torch.autograd.Function):
    """Sends tokens to the ranks of the experts that they chose, once per assignment.

    The empty anchor links `_CombineTokens` to this function, so that its backward runs on all
    ranks, also where the module got no rows and its output does not depend on them.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor, assignments: _Assignments
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.assignments, ctx.features, ctx.at = assignments, tokens.shape[1:], assignments.at
        ctx.set_materialize_grads(False)
        rows = tokens.index_select(0, assignments.by_expert // assignments.per_token)
        return assignments.dispatch(rows), anchor.clone()

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        assignments: _Assignments = ctx.assignments
        grad, link = grads
        if not ctx.needs_input_grad[0]:
            return None, link, None
        if grad is None:
            grad = link.new_zeros(sum(assignments.received), *ctx.features)
        rows = assignments.combine(grad).index_select(0, assignments.by_token)
        return rows.view(-1, assignments.per_token, *ctx.features).sum(1), link, None


class _CombineTokens(torch.autograd.Function):
    """Sends the experts' results to the tokens' ranks, in the order of the tokens' choices."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        link: torch.Tensor,
        assignments: _Assignments,
        *unused: torch.Tensor,
    ) -> torch.Tensor:
        ctx.assignments, ctx.unused, ctx.at = assignments, unused, assignments.at
        return assignments.combine(rows).index_select(0, assignments.by_token)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        assignments: _Assignments = ctx.assignments
        rows = assignments.dispatch(grads[0].index_select(0, assignments.by_expert))
        zeros = (torch.zeros_like(one) if one.requires_grad else None for one in ctx.unused)
        return rows, grads[0].new_empty(0), None, *zeros


AUTOGRAD_FUNCTIONS = (_DispatchTokens, _CombineTokens)


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
