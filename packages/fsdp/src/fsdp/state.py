"""The life of the modules of one call of fully_shard: what happens around their forward."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp import hooks
from fsdp.context import Context
from fsdp.group import Group
from fsdp.root import become_root

__all__ = ["Phase", "State", "state_of"]

_STATE = "_fsdp_state_of_ours"


class Phase(Enum):
    """Where in an iteration the modules are."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class State:
    """Of the modules of one call; as FSDP2's FSDPState.

    Args:
        modules: of the call; several count as one.
        groups: their parameters.
        device: that computes.
        mp_policy: what inputs and outputs are cast to.
        auto_reshard: whether the root may be left unsharded after forward.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[Group],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        auto_reshard: bool,
    ) -> None:
        self.modules, self.groups, self.device = modules, groups, device
        self.mp_policy, self.auto_reshard = mp_policy, auto_reshard
        self.name = ""
        self.context = Context(device)
        self.is_root: bool | None = None  # known after the first forward
        self.phase = Phase.IDLE
        self.prefetch_forward: list[State] = []
        self.prefetch_backward: list[State] = []
        self._left: set[nn.Module] = set()  # modules whose forward is to come in this pass
        hooks.on_group(modules, self.pre_forward, self.post_forward, self._left, self._cast_output)
        for module in modules:
            module.__dict__[_STATE] = self

    # Forward.

    @hooks.no_compile
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gathers, starts the next gather, casts inputs, and waits for their gradients."""
        if self.phase is Phase.PRE_BACKWARD:  # activation checkpointing computes anew
            self.unshard(for_backward=True)
            return self._cast_inputs(args, kwargs)
        first = self.phase is not Phase.FORWARD
        if first:  # what it refuses, it refuses again
            args, kwargs = self._begin_forward(args, kwargs)
        self.phase = Phase.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        upcoming = None
        if first and not hooks.in_backward():
            upcoming = self.context.order.enter(self)
        self.unshard()
        if first:
            for state in self.prefetch_forward or ([upcoming] if upcoming else []):
                state.start_unshard()
            return hooks.after_backward((args, kwargs), self._post_backward)
        return args, kwargs

    @hooks.no_compile
    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Reshards, and waits for the gradients of outputs."""
        if self.phase is Phase.PRE_BACKWARD:
            return self._cast_output(output)
        if not hooks.in_backward():
            for group in self.groups:
                if group.reshard_after_forward:
                    group.reshard(after_forward=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                self.context.order.leave(self)
        hooks.before_backward(output, self._pre_backward)
        self.phase = Phase.IDLE
        if self.context.running_root is self:
            self._end_root_forward(output)
        return self._cast_output(output)

    def unshard(self, *, for_backward: bool = False) -> None:
        """Gathers all groups, and waits for them."""
        self.start_unshard(for_backward=for_backward)
        for group in self.groups:
            group.wait_for_unshard()

    def start_unshard(self, *, for_backward: bool = False) -> None:
        """Starts to gather all groups."""
        for group in self.groups:
            group.unshard(for_backward=for_backward)

    def reshard(self) -> None:
        """Reshards all groups."""
        for group in self.groups:
            group.reshard()

    def _begin_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the root does first."""
        if self.is_root is None:
            become_root(self)
        context = self.context
        if context.running_root is not None:
            return args, kwargs
        context.running_root = self
        context.order.begin_forward()
        context.streams.all_wait(context.post_optim_event)
        context.post_optim_event = None
        if self.device.type == "cpu":
            return args, kwargs

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        args, kwargs = hooks.on_tensors(move, (args, kwargs))
        return args, kwargs

    def _end_root_forward(self, output: Any) -> None:
        """What the root does last: ends groups of which some modules ran, and stray gathers."""
        context = self.context
        context.running_root = None
        context.order.end_forward()
        for state in context.all_states:
            if state is not self and state._left:
                state._left.clear()
                state.post_forward(None, None, output)
            for group in state.groups:
                if group.gatherer.under_way:
                    group.reshard()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        wanted = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        return hooks.cast(args, wanted), hooks.cast(kwargs, wanted)

    def _cast_output(self, output: Any) -> Any:
        return hooks.cast(output, self.mp_policy.output_dtype)

    # Backward.

    @hooks.no_compile
    def _pre_backward(self) -> None:
        """Gathers before the first gradient, and starts the next gather."""
        context = self.context
        if not context.callback_queued:
            context.callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_of_backward)
        if self.phase is Phase.PRE_BACKWARD:
            return
        self.phase = Phase.PRE_BACKWARD
        for group in self.groups:
            if group.unshard_in_backward:
                group.unshard(for_backward=True)
                group.wait_for_unshard()
        upcoming = context.order.enter_backward(self)
        for state in self.prefetch_backward or ([upcoming] if upcoming else []):
            for group in state.groups:
                if group.unshard_in_backward:
                    group.unshard(for_backward=True)

    @hooks.no_compile
    def _post_backward(self) -> None:
        self.phase = Phase.POST_BACKWARD
        for group in self.groups:
            self.context.post_backward(group)

    @hooks.no_compile
    def end_of_backward(self) -> None:
        """The root's last word: reduces what had no input with a gradient, and waits."""
        context = self.context
        context.callback_queued, context.running_root = False, None
        for state in context.all_states:
            state._left.clear()
            if state.phase is not Phase.POST_BACKWARD:
                state._post_backward()
            state.phase = Phase.IDLE
        if context.is_last_backward and not context.ends_by_hand:
            self.end_iteration()

    def end_iteration(self) -> None:
        """Waits for all reductions, and ends stray gathers."""
        context = self.context
        context.finish_reductions()
        context.order.end_backward()
        for state in context.all_states:
            for group in state.groups:
                if group.gatherer.under_way:
                    group.reshard()

    def finalize_backward(self) -> None:
        """Reduces what backwards have put off.

        Raises:
            RuntimeError: this is not the root, or backwards end by themselves.
        """
        if self.is_root is False or not self.context.ends_by_hand:
            raise RuntimeError(
                "fsdp: finalize_backward wants the root, and "
                "set_manual_backward_finalization(True) before"
            )
        for state in reversed(self.context.all_states):
            for group in reversed(state.groups):
                self.context.post_backward(group)

    def reset(self) -> None:
        """Forgets an iteration that failed: waits for collectives, reshards, drops gradients.

        Raises:
            RuntimeError: this is not the root.
        """
        if self.is_root is False:
            raise RuntimeError(
                "fsdp: reset_iter_state of a module that is not the root; call it there"
            )
        for state in self.context.all_states or [self]:
            state._left.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.reducer.drop()
                group.reshard()
        self.context.drop()

    # Names under which torch's pipeline stages look for what they need.

    @property
    def _state_ctx(self) -> Context:
        return self.context

    @property
    def _fsdp_param_groups(self) -> list[_Reducible]:
        return [_Reducible(self, group) for group in self.groups]

    @property
    def _fsdp_param_group(self) -> _Reducible | None:  # torch 2.11 knows of one
        return _Reducible(self, *self.groups) if self.groups else None

    def _root_post_backward_final_callback(self) -> None:
        for state in self.context.all_states:
            state.phase = Phase.POST_BACKWARD
        self.end_of_backward()


class _Reducible:
    """Groups as torch's pipeline stages see them."""

    def __init__(self, state: State, *groups: Group) -> None:
        self._state, self._groups = state, groups

    def post_backward(self) -> None:
        """Reduces what all microbatches have added up."""
        for group in self._groups:
            self._state.context.post_backward(group)


def state_of(module: nn.Module) -> State | None:
    """The state of a module that was sharded; None of others."""
    found: State | None = module.__dict__.get(_STATE)
    return found
