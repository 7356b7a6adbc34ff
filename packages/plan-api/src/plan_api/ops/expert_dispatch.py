"""Tokens sent to the ranks of the experts that they have chosen, and what these make of them back.

Note: a *pair* is a token and one expert that it has chosen. On each rank pairs are sorted by
expert, and so by the rank that has it; one all-to-all tells each rank how many pairs come for each
of its experts, a second one brings their tokens, and when the module has run a third one takes the
results back, where they are weighted and added up. No token is dropped, and none is padded: splits
are uneven. Backward is the second and the third, the other way.

All ranks make all of these collectives, whatever they have: a rank to which nothing comes runs its
module on no rows.

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

from plan_api.lowering.fuse import Step
from plan_api.runtime.attribution import moving
from plan_api.runtime.error_context import StepContext, annotate_backward_errors
from plan_api.runtime.hooks import given_at, replaced_at
from plan_api.spec.axes import axis_names

__all__ = ["Dispatch", "Dispatching"]


@dataclass(frozen=True)
class Dispatch:
    """Where a module is told of tokens, and which ranks have what they choose.

    Attributes:
        tokens: the place and the name of the argument with a row for each token.
        weights: of the one with a weight for each pair; None: pairs have none.
        parts: what each rank has, along the axes, the first of them outermost.
        step: of the plan, which sends them.
    """

    tokens: tuple[int, str]
    weights: tuple[int, str] | None
    parts: tuple[range, ...]
    step: Step


@dataclass(frozen=True)
class _Route:
    """Of the pairs of one call.

    Attributes:
        order: (pairs,), int64: by expert; ``back`` undoes it.
        back: (pairs,), int64.
        sent: rows for each rank.
        came: rows from each rank.
        choices: pairs of a token.
        group: by name.
        step: of the plan.
        at: the same, for messages of backward.
    """

    order: torch.Tensor
    back: torch.Tensor
    sent: Sequence[int]
    came: Sequence[int]
    choices: int
    group: str
    step: Step
    at: StepContext

    def there(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows, sorted by expert, brought to the experts' ranks."""
        with moving(self.step, (), ()):
            return _all_to_all(rows, self.came, self.sent, self.group)

    def home(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows brought back to the tokens' ranks, sorted by expert."""
        with moving(self.step, (), ()):
            return _all_to_all(rows, self.sent, self.came, self.group)

    def _waits_for_(self) -> str:
        """For `fused_comm.diagnosis`."""
        return f"plan-api: tokens sent to the ranks of their experts, {self.step.said}"


class Dispatching:
    """Hooks of a module whose tokens are dispatched; it sees plain tensors.

    Args:
        dispatch: of the module.
        index: the place and the name of the argument with the choices.
        own: what this rank has.
        axes: of the mesh, by number, along which it is divided.
        mesh: the plan's; all its ranks make this.
        path: of the module, for messages.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        index: tuple[int, str],
        own: range,
        axes: Sequence[int],
        mesh: DeviceMesh,
        path: str,
    ) -> None:
        self._dispatch, self._index, self._own, self._path = dispatch, index, own, path
        self._group = _group_of(mesh, axes)
        self._under_way: tuple[_Route, torch.Tensor, torch.Tensor | None] | None = None

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the module runs: what it is given are the tokens that have chosen its own.

        Raises:
            ValueError: an argument is missing, or has another shape; a choice is of nothing.
        """
        tokens = self._given(self._dispatch.tokens, args, kwargs)
        index = self._given(self._index, args, kwargs)
        weights = None
        if self._dispatch.weights is not None:
            weights = self._given(self._dispatch.weights, args, kwargs)
        if tokens.ndim != 2 or index.ndim != 2 or len(index) != len(tokens):
            raise ValueError(
                f"{self._path} is given {self._dispatch.tokens[1]} of {tuple(tokens.shape)} and "
                f"{self._index[1]} of {tuple(index.shape)}; to dispatch tokens wants a row for "
                f"each, (tokens, features), and its choices beside it, (tokens, choices)"
            )
        route, chosen = self._routed(index)
        learns = tokens.requires_grad or any(one.requires_grad for one in _params(module))
        anchor = tokens.new_empty(0).requires_grad_(learns and torch.is_grad_enabled())
        rows, link = _Sent.apply(tokens, anchor, route)  # type: ignore[no-untyped-call]
        self._under_way = route, link, weights
        args, kwargs = replaced_at(self._dispatch.tokens, args, kwargs, rows)
        args, kwargs = replaced_at(self._index, args, kwargs, chosen)
        if self._dispatch.weights is not None:
            assert weights is not None
            ones = torch.ones_like(chosen, dtype=weights.dtype)
            args, kwargs = replaced_at(self._dispatch.weights, args, kwargs, ones)
        return args, kwargs

    def leave(self, module: nn.Module, _: Any, output: Any) -> Any:
        """When it has run: a row for each of this rank's tokens.

        Raises:
            ValueError: the module has not returned a row for each that it was given.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is None or output is None:  # it has raised
            return None
        route, link, weights = under_way
        if not isinstance(output, torch.Tensor) or len(output) != sum(route.came):
            what = f"{type(output).__name__} of {tuple(getattr(output, 'shape', ()))}"
            raise ValueError(
                f"{self._path} returned a {what}, and was given {sum(route.came)} tokens: to "
                f"dispatch them wants a row back for each"
            )
        # Where no token comes gradients are zero, and not missing, as on the other ranks.
        unused = [] if len(output) else _params(module)
        rows = _Returned.apply(output, link, route, *unused)  # type: ignore[no-untyped-call]
        rows = rows.view(-1, route.choices, *output.shape[1:])  # of a token, side by side
        if weights is not None:
            rows = rows * weights.view(*weights.shape, *[1] * (rows.ndim - 2))
        return rows.sum(1).to(output.dtype)

    def _given(
        self, argument: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor:
        found = given_at(argument, args, kwargs)
        if not isinstance(found, torch.Tensor):
            raise ValueError(
                f"{self._path} is given {found!r} as {argument[1] or argument[0]}; to dispatch "
                f"tokens wants a tensor"
            )
        return found

    def _routed(self, index: torch.Tensor) -> tuple[_Route, torch.Tensor]:
        """The way of the pairs of these choices; and the choices that come here, (rows, 1)."""
        parts, own = self._dispatch.parts, self._own
        lengths, number = [len(part) for part in parts], parts[-1].stop
        chosen, order = index.flatten().sort(stable=True)
        ends = torch.arange(number + 1, device=index.device, dtype=chosen.dtype)
        counts = torch.searchsorted(chosen, ends).diff()  # pairs for each expert
        with moving(self._dispatch.step, (), ()):
            came = _all_to_all(counts, [len(own)] * len(parts), lengths, self._group)
        told = torch.cat([counts, came]).tolist()  # the one time that the host waits
        if sum(told[:number]) != len(order):
            low, high = int(chosen[0]), int(chosen[-1])
            raise ValueError(
                f"{self._path} is given choices from {low} to {high} as {self._index[1]}: there "
                f"are {number}, from 0"
            )
        sent = [sum(told[part.start : part.stop]) for part in parts]
        from_ranks = [
            sum(told[number + rank * len(own) : number + (rank + 1) * len(own)])
            for rank in range(len(parts))
        ]
        numbers = torch.arange(len(own), device=index.device, dtype=index.dtype).repeat(len(parts))
        here = numbers.repeat_interleave(came, output_size=sum(from_ranks))
        route = _Route(
            order, order.argsort(), sent, from_ranks, index.shape[1], self._group,
            self._dispatch.step, StepContext(f"the backward of {self._path}", self._dispatch.step),
        )  # fmt: skip
        return route, here.unsqueeze(1)


class _Sent(torch.autograd.Function):
    """Tokens, to the ranks of the experts that they have chosen, as often as they have.

    What is empty beside them ties `_Returned` to this, so that backward comes by on all ranks, also
    where a module that was given no rows has made its result of nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor, route: _Route
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.route, ctx.features, ctx.at = route, tokens.shape[1:], route.at
        ctx.set_materialize_grads(False)
        rows = tokens.index_select(0, route.order // route.choices)
        return route.there(rows), anchor.clone()

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        route: _Route = ctx.route
        grad, link = grads
        if not ctx.needs_input_grad[0]:
            return None, link, None
        if grad is None:
            grad = link.new_zeros(sum(route.came), *ctx.features)
        rows = route.home(grad).index_select(0, route.back)
        return rows.view(-1, route.choices, *ctx.features).sum(1), link, None


class _Returned(torch.autograd.Function):
    """What became of them, back to the tokens' ranks, in the order of the tokens' choices."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, link: torch.Tensor, route: _Route, *unused: torch.Tensor
    ) -> torch.Tensor:
        ctx.route, ctx.unused, ctx.at = route, unused, route.at
        return route.home(rows).index_select(0, route.back)

    @staticmethod
    @annotate_backward_errors
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        route: _Route = ctx.route
        rows = route.there(grads[0].index_select(0, route.order))
        zeros = (torch.zeros_like(one) if one.requires_grad else None for one in ctx.unused)
        return rows, grads[0].new_empty(0), None, *zeros


def _params(module: nn.Module) -> list[torch.Tensor]:
    """What a module and those in it find as their parameters now: local tensors."""
    return [getattr(owner, name) for owner in module.modules() for name in (*owner._parameters,)]


def _group_of(mesh: DeviceMesh, axes: Sequence[int]) -> str:
    """The name of the group of all ranks along some axes, the first of them outermost."""
    if len(axes) == 1:
        return mesh.get_group(axes[0]).group_name
    names = axis_names(mesh)
    return mesh[tuple(names[axis] for axis in axes)]._flatten().get_group().group_name


def _all_to_all(
    rows: torch.Tensor, came: Sequence[int], sent: Sequence[int], group: str
) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    arrived = ops.all_to_all_single(rows.contiguous(), [*came], [*sent], group)
    return ops.wait_tensor(arrived)  # type: ignore[no-any-return]
