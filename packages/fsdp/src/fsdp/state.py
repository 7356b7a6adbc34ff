"""The state of the modules of one call of fully_shard, and what happens around their forward.

Note: the path of one step, for each group of a state.
    pre-forward: `FSDPState.pre_forward` here -> `FSDPParamGroup.unshard` (param_group.py)
        -> `GroupAllGather.start` and ``wait`` (collectives/all_gather.py)
    post-forward: `FSDPState.post_forward` -> `FSDPParamGroup.reshard` -> `GroupAllGather.free`
    pre-backward: `FSDPState._pre_backward`, by a hook on the outputs -> as pre-forward
    post-backward: `FSDPState._post_backward`, by a hook on the inputs
        -> `FSDPContext.post_backward` -> `FSDPParamGroup.reshard`, `GroupReduceScatter.copy_in` and
        ``start`` (collectives/reduce_scatter.py)
    finalize: `FSDPState.end_backward`, a callback of autograd's engine, in the root
        -> `FSDPContext.finish_reductions` -> `GroupReduceScatter.wait`, which assigns ``.grad``
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp._compat import in_backward, map_tensors, no_compile
from fsdp.collectives.comm import CommStreams
from fsdp.collectives.execution_order import ExecutionOrder
from fsdp.mesh import no_typecheck, typed_as_local
from fsdp.param_group import FSDPParamGroup, set_names, verify_groups
from fsdp.private_names import STATE, StateNames

__all__ = [
    "FSDPContext",
    "FSDPState",
    "TrainingState",
    "state_of",
]


P = ParamSpec("P")
R = TypeVar("R")


def _internal(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps torch.compile from tracing a hook, and spmd_types from checking its operators."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_typecheck():
            return function(*args, **kwargs)

    return no_compile(call)


class TrainingState(Enum):
    """The stage of an iteration that the modules of a state are in; the names are FSDP2's."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class FSDPContext:
    """What all states under a root share, from the root's first forward on.

    Attributes:
        all_states: the root's first, then in the order of modules.
        streams: of the collectives.
        order: of forwards and backwards.
        running_root: the root while its forward runs.
        is_last_backward: whether the next backward waits for reductions.
        manual_finalization: whether no backward does, but `FSDPState.finalize_backward`.
        active_finalization: `manual_finalization` from an iteration's first backward to its end;
            None before.
        reduction: of an asynchronous `FSDPState.finalize_backward` that was not waited for.
        sharing: the contexts that share streams with this one, itself included.
        callback_queued: whether `FSDPState.end_backward` will be called after this backward.
        post_optim_event: that all-gathers wait for, in place of the current stream.
        max_input_buffers: reductions whose buffers may be allocated at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.all_states: list[FSDPState] = []
        self.streams = CommStreams(device)
        self.order: ExecutionOrder[FSDPState] = ExecutionOrder()
        self.running_root: FSDPState | None = None
        self.is_last_backward = True
        self.manual_finalization = False
        self.active_finalization: bool | None = None
        self.reduction: object | None = None
        self.sharing: list[FSDPContext] = [self]
        self.callback_queued = False
        self.post_optim_event: Any = None
        self.max_input_buffers = 1
        self._in_flight: list[FSDPParamGroup] = []

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Reduces a group's gradients, after all memory that is not needed for it was freed.

        The memory of a step peaks about here, so gradients are reduced in the memory of the
        parameters where they fit; elsewhere these and the buffer of the reduction before are freed
        first, and the gradients' own buffer is allocated last.
        """
        memory = group.memory_for_gradients()
        if group.reshard_after_backward:
            group.reshard(keep_storage=memory is not None)
        self._wait_for_reductions(self.max_input_buffers - 1)
        group.reduce_scatter.copy_in(memory)
        group.reduce_scatter.start()
        if group.reduce_scatter.in_flight:
            self._in_flight.append(group)

    @property
    def pending(self) -> FSDPContext | None:
        """Of the contexts that share streams, the one whose `reduction` was not waited for."""
        return next((one for one in self.sharing if one.reduction is not None), None)

    @property
    def awaits_reduction(self) -> bool:
        """Whether reductions are in flight, or a backward will start some."""
        return bool(self._in_flight) or self.order.awaits_backward

    def finish_reductions(self) -> None:
        """Waits for all reductions."""
        self._wait_for_reductions(0)

    def _wait_for_reductions(self, most: int) -> None:
        """Waits for the oldest reductions until at most so many are in flight."""
        while len(self._in_flight) > most:
            oldest = self._in_flight.pop(0)
            oldest.reduce_scatter.wait()

    def reset(self) -> None:
        """Forgets an iteration that failed."""
        self._in_flight.clear()
        self.order.begin_forward()
        self.order.end_forward()
        self.order.end_backward()
        self.running_root, self.callback_queued = None, False
        self.active_finalization = self.reduction = None


class FSDPState(StateNames):
    """The state of the modules of one call, as FSDP2's FSDPState.

    Args:
        modules: of the call; several count as one.
        groups: of their parameters.
        device: that computes.
        mp_policy: of inputs and outputs.
        auto_reshard: whether the root may stay unsharded after forward.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        groups: list[FSDPParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        *,
        auto_reshard: bool,
    ) -> None:
        self.modules, self.groups, self.device = modules, groups, device
        self.mp_policy, self.auto_reshard = mp_policy, auto_reshard
        self.name = ""
        self.context = FSDPContext(device)
        self.is_root: bool | None = None  # known after the first forward
        self.training_state = TrainingState.IDLE
        self.forward_prefetch: list[FSDPState] = []
        self.backward_prefetch: list[FSDPState] = []
        self._pending: set[nn.Module] = set()  # modules whose forward has not ended in this pass
        register_forward_hooks(
            modules, self.pre_forward, self.post_forward, self._pending, self._cast_output
        )
        for module in modules:
            module.__dict__[STATE] = self
        if any(group.annotated for group in groups):
            typed_as_local(_PostBackward)

    # Forward.

    @no_compile
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Unshards, starts the next all-gather, casts inputs, and hooks their gradients."""
        if self.context.pending is not None:
            raise RuntimeError(
                "fsdp: The previous gradient reduction must be waited on before forward; call "
                "wait() of the handle that finalize_backward(async_op=True) returned"
            )
        if self.training_state is TrainingState.PRE_BACKWARD:  # activation checkpointing recomputes
            with no_typecheck():
                self.unshard(for_backward=True)
            return self._cast_inputs(args, kwargs)
        first = self.training_state is not TrainingState.FORWARD
        if first:  # before the training state changes: an error is raised by the next call, too
            with no_typecheck():
                args, kwargs = self._root_pre_forward(args, kwargs)
        self.training_state = TrainingState.FORWARD
        args, kwargs = self._cast_inputs(args, kwargs)
        upcoming = None
        if first and not in_backward():
            upcoming = self.context.order.pre_forward(self)
        with no_typecheck():
            self.unshard()
            if first:
                for state in self.forward_prefetch or ([upcoming] if upcoming else []):
                    state.start_unshard()
        for group in self.groups:
            group.restore_annotations()
        if first:
            return register_post_backward_hook((args, kwargs), self._post_backward_hook)
        return args, kwargs

    @_internal
    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Reshards, casts outputs, and hooks their gradients."""
        if self.training_state is TrainingState.PRE_BACKWARD:
            return self._cast_output(output)
        if not in_backward():
            for group in self.groups:
                if group.reshard_after_forward:
                    group.reshard(after_forward=torch.is_grad_enabled())
            if torch.is_grad_enabled():
                self.context.order.post_forward(self)
        register_pre_backward_hook(output, self._pre_backward)
        self.training_state = TrainingState.IDLE
        if self.context.running_root is self:
            self._root_post_forward(output)
        return self._cast_output(output)

    def unshard(self, *, for_backward: bool = False) -> None:
        """Gathers the parameters of all groups, and waits for them."""
        self.start_unshard(for_backward=for_backward)
        for group in self.groups:
            group.wait_for_unshard()

    def start_unshard(self, *, for_backward: bool = False) -> None:
        """Starts the all-gathers of all groups."""
        for group in self.groups:
            group.unshard(for_backward=for_backward)

    def reshard(self) -> None:
        """Reshards all groups."""
        for group in self.groups:
            group.reshard()

    def _root_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begins the root's forward; in its first one, makes it the root."""
        if self.is_root is None:
            self._lazy_init()
        context = self.context
        if context.running_root is not None:
            return args, kwargs
        context.running_root = self
        context.order.begin_forward()
        context.streams.all_gather_waits(context.post_optim_event)
        context.post_optim_event = None
        if self.device.type == "cpu":
            return args, kwargs

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True)

        args, kwargs = map_tensors(move, (args, kwargs))
        return args, kwargs

    def _root_post_forward(self, output: Any) -> None:
        """Ends the root's forward, and that of states of which only some modules ran.

        Parameters whose prefetch was not used are resharded.
        """
        context = self.context
        context.running_root = None
        context.order.end_forward()
        for state in context.all_states:
            if state is not self and state._pending:
                state._pending.clear()
                state.post_forward(None, None, output)
            for group in state.groups:
                if group.all_gather.in_flight:
                    group.reshard()

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype if self.mp_policy.cast_forward_inputs else None
        return cast_tensors(args, dtype), cast_tensors(kwargs, dtype)

    def _cast_output(self, output: Any) -> Any:
        return cast_tensors(output, self.mp_policy.output_dtype)

    # Backward.

    @_internal
    def _pre_backward(self) -> None:
        """Unshards before the first gradient, and starts the next all-gather."""
        context = self.context
        if not context.callback_queued:
            context.callback_queued = True
            if context.active_finalization is None:
                context.active_finalization = context.manual_finalization
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
        if self.training_state is TrainingState.PRE_BACKWARD:
            return
        self.training_state = TrainingState.PRE_BACKWARD
        for group in self.groups:
            if group.unshard_in_backward:
                group.unshard(for_backward=True)
                group.wait_for_unshard()
        upcoming = context.order.pre_backward(self)
        for state in self.backward_prefetch or ([upcoming] if upcoming else []):
            for group in state.groups:
                if group.unshard_in_backward:
                    group.unshard(for_backward=True)

    @_internal
    def _post_backward(self) -> None:
        self.training_state = TrainingState.POST_BACKWARD
        for group in self.groups:
            self.context.post_backward(group)

    @_internal
    def _post_backward_hook(self) -> None:
        """Reduces, and ends a backward in which no hook on an output will: see `_end_partial_pass`.

        Outputs of a module that ran apart from the others of its call have no hook.
        """
        self._post_backward()
        if not self.context.callback_queued:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_partial_pass)

    @_internal
    def _end_partial_pass(self) -> None:
        """Ends a pass through some modules of a call, as of a head that runs in chunks.

        Gradients of this state are complete then. Other modules may still await their backward:
        they stay unsharded, and in the execution order.
        """
        context = self.context
        self._pending.clear()
        if context.running_root is self:
            context.running_root = None
        if context.is_last_backward and not context.manual_finalization:
            context.finish_reductions()
            for group in self.groups:
                group.end_iteration()

    @_internal
    def end_backward(self, *, reduced: bool = False) -> None:
        """Reduces the groups whose module had no input with a gradient, and waits; of the root.

        Args:
            reduced: whether all groups were reduced already, as by a pipeline stage.
        """
        context = self.context
        context.callback_queued, context.running_root = False, None
        for state in context.all_states:
            state._pending.clear()
            if not reduced and state.training_state is not TrainingState.POST_BACKWARD:
                state._post_backward()
            state.training_state = TrainingState.IDLE
        if context.is_last_backward and not context.manual_finalization:
            self.end_iteration()

    def end_iteration(self) -> None:
        """Waits for all reductions, and reshards parameters whose prefetch was not used."""
        context = self.context
        context.finish_reductions()
        context.order.end_backward()
        context.active_finalization = None
        for state in context.all_states:
            for group in state.groups:
                if group.all_gather.in_flight:
                    group.reshard()
                group.end_iteration()

    def set_manual_finalization(self, enabled: bool) -> None:
        """Sets whether `finalize_backward` ends iterations, and no backward.

        Raises:
            RuntimeError: see `FSDPModule.set_manual_backward_finalization`.
        """
        context = self.context
        self._check_root("set_manual_backward_finalization")
        if enabled != context.manual_finalization and in_backward():
            raise RuntimeError(
                "fsdp: set_manual_backward_finalization cannot change mode during backward"
            )
        if context.active_finalization not in (None, enabled):
            raise RuntimeError(
                "fsdp: set_manual_backward_finalization cannot change mode after backward starts; "
                "call it before, or after finalize_backward or a last backward"
            )
        context.manual_finalization = enabled

    def finalize_backward(self, *, async_op: bool) -> object:
        """Reduces the gradients that backwards have not reduced; `wait_for_reduction` waits.

        Args:
            async_op: whether other work comes before the wait.

        Raises:
            RuntimeError: see `FSDPModule.finalize_backward`.
        """
        context = self.context
        if context.reduction is not None:
            raise RuntimeError(
                "fsdp: The previous gradient reduction must be waited on before finalizing "
                "backward again; call wait() of its handle"
            )
        if context.pending is not None:
            raise RuntimeError(
                "fsdp: Another gradient reduction sharing this communication context must be "
                "waited on before finalizing backward; call wait() of its handle"
            )
        self._check_root("finalize_backward")
        if not context.manual_finalization:
            raise RuntimeError(
                "fsdp: finalize_backward requires manual backward finalization; call "
                "set_manual_backward_finalization(True) before forward"
            )
        if context.callback_queued:
            raise RuntimeError("fsdp: finalize_backward must be called after backward completes")
        groups = [group for state in reversed(context.all_states) for group in state.groups[::-1]]
        for group in groups:
            reduces = group.reduce_scatter.reduce_grads and group.mesh.ndim == 2
            if group.reduce_scatter.is_partly_reduced:
                raise RuntimeError(
                    f"fsdp: manual backward finalization does not support partial gradient "
                    f"reductions, got a backward with set_requires_all_reduce(False) of "
                    f"{group.names}; call set_requires_all_reduce(True) before backward"
                )
            if reduces and not group.reduce_scatter.all_reduce_grads:
                raise RuntimeError(
                    f"fsdp: manual backward finalization requires all-reduce, got "
                    f"set_requires_all_reduce(False) of {group.names}; call "
                    f"set_requires_all_reduce(True) before finalization"
                )
        if async_op and any(one.awaits_reduction for one in context.sharing if one is not context):
            raise RuntimeError(
                "fsdp: Asynchronous gradient finalization cannot overlap work from another FSDP "
                "root sharing the communication context; finalize that root first, or leave out "
                "share_comm_ctx or async_op"
            )
        for group in groups:
            context.post_backward(group)
        context.reduction = object()
        return context.reduction

    def wait_for_reduction(self, reduction: object) -> None:
        """Waits for what `finalize_backward` has started.

        Raises:
            RuntimeError: `reset` was called since.
        """
        if self.context.reduction is not reduction:
            raise RuntimeError(
                "fsdp: This gradient reduction handle was invalidated by reset_iter_state"
            )
        self.context.reduction = None
        self.end_iteration()

    def _check_root(self, method: str) -> None:
        if self.is_root is False:
            raise RuntimeError(
                f"fsdp: {method} must be called on the root FSDP module, got {self.name!r}"
            )

    def reset(self) -> None:
        """Forgets an iteration that failed: waits for collectives, reshards, drops gradients.

        Raises:
            RuntimeError: this is not the root; one that shares streams waits for a reduction.
        """
        self._check_root("reset_iter_state")
        if self.context.pending not in (None, self.context):
            raise RuntimeError(
                "fsdp: reset_iter_state cannot reset a gradient reduction owned by another FSDP "
                "root sharing the communication context; call wait() of its handle, or reset "
                "that root"
            )
        for state in self.context.all_states or [self]:
            state._pending.clear()
            state.training_state = TrainingState.IDLE
            for group in state.groups:
                group.reduce_scatter.discard()
                group.reshard()
                group.changes.expire()
        self.context.reset()

    # The first forward.

    def _lazy_init(self) -> None:
        """Makes this state the root of all states below it, which then share its context.

        Raises:
            RuntimeError: a module below ran first; several modules cannot be the root; parameters
                were replaced since; manual finalization was set on a module below.
            ValueError: another setting of the root was changed on a module below; ranks differ.
        """
        if len(self.modules) > 1:
            raise RuntimeError(
                f"fsdp: FSDP requires a single root module, got {len(self.modules)} modules that "
                f"were sharded in one call, of which one ran before any module that contains them; "
                f"call fully_shard on the model too, and run that"
            )
        states: dict[FSDPState, str] = {}
        for name, child in self.modules[0].named_modules():
            state = state_of(child)
            if state is not None:
                states.setdefault(state, name)
        for state, name in states.items():
            if state is self:
                continue
            _check_settings(name, state.context, self.context)
            if state.is_root is not None:
                raise RuntimeError(
                    f"fsdp: {name!r} ran forward before the module that contains it; FSDP requires "
                    f"running forward through the root module first"
                )
        for state, name in states.items():
            state.is_root, state.name = state is self, name
        context = self.context
        context.all_states = list(states)
        context.max_input_buffers = max(state.context.max_input_buffers for state in states)
        for state in states:
            state.context = context
            for group in state.groups:
                group.set_streams(context.streams)
        if self.auto_reshard:
            for group in self.groups:
                group.set_reshard_after_forward(False)
        groups = [group for state in states for group in state.groups]
        set_names(self.modules[0], groups)
        for group in groups:
            if not group.is_unsharded:
                group.reset_sharded_params()
        verify_groups(groups)


def state_of(module: nn.Module) -> FSDPState | None:
    """Returns the state of a module that was sharded; None for others."""
    state: FSDPState | None = module.__dict__.get(STATE)
    return state


def _check_settings(name: str, context: FSDPContext, root: FSDPContext) -> None:
    """Refuses settings of a module below the root that only the root has.

    Raises:
        RuntimeError: manual finalization is one, as torch raises.
        ValueError: another is; both name the module and the method.
    """
    if context.manual_finalization and not root.manual_finalization:
        raise RuntimeError(
            f"fsdp: set_manual_backward_finalization must be called on the root FSDP module, got "
            f"{name!r}"
        )
    for method, changed in (
        ("set_is_last_backward", root.is_last_backward and not context.is_last_backward),
        ("set_post_optim_event", context.post_optim_event not in (None, root.post_optim_event)),
    ):
        if changed:
            raise ValueError(
                f"{method}: expected the root, got {name!r}, which is below it; call it on the "
                f"module whose forward runs first"
            )


# Hooks on modules, and autograd hooks on their inputs and outputs.


def cast_tensors(tensors: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating-point tensors in a structure; None casts nothing."""
    if dtype is None:
        return tensors

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return map_tensors(cast, tensors)


def register_pre_backward_hook(output: Any, hook: Callable[[], None]) -> None:
    """Calls a hook when the gradient of a module's output has been computed."""

    def run(gradient: torch.Tensor) -> None:
        hook()

    def register(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            tensor.register_hook(run)
        return tensor

    if torch.is_grad_enabled():
        map_tensors(register, output)


def register_post_backward_hook(
    arguments: tuple[tuple[Any, ...], dict[str, Any]], hook: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a module; calls a hook when all their gradients are computed."""
    if not torch.is_grad_enabled():
        return arguments
    inputs: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            inputs.append(tensor)
        return tensor

    map_tensors(collect, arguments)
    if not inputs:
        return arguments
    outputs = iter(_PostBackward.apply(hook, *inputs))  # type: ignore[no-untyped-call]

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        return next(outputs) if tensor.requires_grad else tensor

    args, kwargs = map_tensors(replace, arguments)
    return args, kwargs


class _PostBackward(torch.autograd.Function):
    """Returns its inputs, and calls a hook in backward, after all their gradients."""

    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.hook = hook
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.hook()
        return None, *gradients


def register_forward_hooks(
    modules: tuple[nn.Module, ...],
    pre_forward: Callable[..., Any],
    post_forward: Callable[..., Any],
    pending: set[nn.Module],
    cast_output: Callable[[Any], Any],
) -> None:
    """Registers hooks around the forwards of one module, or of several that count as one.

    Args:
        modules: of one call of fully_shard.
        pre_forward: runs before each forward.
        post_forward: runs after the last of them.
        pending: modules whose forward has not ended in this pass; updated by the hooks.
        cast_output: converts the outputs of the forwards before the last.
    """

    def group_pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not pending:
            pending.update(modules)
        return pre_forward(module, args, kwargs)

    def group_post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        if module in pending:
            pending.remove(module)
            if not pending:
                return post_forward(module, args, output)
        return cast_output(output)

    if len(modules) > 1:
        pre_forward_hook, hook = no_compile(group_pre_forward), no_compile(group_post_forward)
    else:
        pre_forward_hook, hook = pre_forward, post_forward
    for module in modules:
        module.register_forward_pre_hook(pre_forward_hook, prepend=True, with_kwargs=True)
        module.register_forward_hook(hook)
