"""`FSDPModule`: the methods of a sharded module, those of `torch.distributed.fsdp.FSDPModule`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle

from fsdp import _compat
from fsdp._compat import AllGather, GradientReductionHandle, ReduceScatter
from fsdp.collectives.grad_dtype import grads_of_own_dtype
from fsdp.param_group import FSDPParamGroup
from fsdp.private_names import ModuleNames
from fsdp.state import FSDPState, state_of

__all__ = ["FSDPModule", "set_fsdp_class", "states_of"]

_fsdp_classes: dict[type, type] = {}  # by the original class


class FSDPModule(ModuleNames, TorchFSDPModule):
    """The base class that `fully_shard` adds to a module, with the methods of torch's FSDPModule.

    Methods with ``recurse`` set an option of all sharded modules below, too.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes a module of the original class, so that ``type(module)(...)`` is not sharded."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raises an AssertionError as torch's, as buffers and process groups cannot be copied."""
        raise AssertionError(
            f"fsdp: FSDP does not support deepcopy of {type(self).__name__}; use its state dict"
        )

    # Parameters.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters, not those of sharded modules below.

        The all-gather follows what was issued on the current stream, as an optimizer step.

        Args:
            async_op: whether to return a handle, whose ``wait()`` registers the parameters.
        """
        state = self._get_fsdp_state()
        state.context.streams.all_gather_waits()
        state.start_unshard()
        handle = _UnshardHandle(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's own unsharded parameters, and registers the sharded ones.

        Those that ``placements=`` of `fully_shard` keeps stay, and are gathered again when they
        are needed, as after a change of the sharded ones.
        """
        state = self._get_fsdp_state()
        state.reshard()
        for group in state.groups:
            group.changes.expire()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether parameters are freed after forward, in place of `fully_shard`'s argument.

        Raises:
            ValueError: it is no bool; ``placements=`` keeps parameters unsharded between steps.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: reshard_after_forward should be a bool, got "
                f"{reshard_after_forward!r}"
            )
        for group in self._groups(recurse):
            if group.keeps_parameters and reshard_after_forward:
                raise ValueError(
                    f"set_reshard_after_forward: expected False for {group.names}, which "
                    f"placements ({group.options.roles}) keep unsharded, got True; shard them with "
                    f"placements='zero3'"
                )
        for state in self._states(recurse):
            state.auto_reshard = False
            for group in state.groups:
                group.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters are freed after backward; False saves a gather per microbatch."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether unsharded parameters keep their memory, as CUDA graphs need it.

        Modules have the sharded parameters all the same, and gather again, where
        ``reshard_after_forward`` is a number over so many ranks.
        """
        for group in self._groups(recurse):
            group.keep_unsharded_storage = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward gathers the parameters; an embedding's does not need them."""
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Sets the modules that are gathered while this module's forward runs.

        By default it is the one whose forward came next in the last iteration.
        """
        method = "set_modules_to_forward_prefetch"
        self._get_fsdp_state().forward_prefetch = states_of(modules, method)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Sets the modules that are gathered while this module's backward runs.

        By default it is the one whose forward ran before this module's.
        """
        method = "set_modules_to_backward_prefetch"
        self._get_fsdp_state().backward_prefetch = states_of(modules, method)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Sets what the next all-gathers wait for, in place of the current stream; of the root."""
        self._get_fsdp_state().context.post_optim_event = event

    # Gradients.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether the next backward waits for reductions and ends the iteration."""
        self._get_fsdp_state().context.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Sets whether `finalize_backward` waits for reductions, and no backward; of the root.

        Raises:
            RuntimeError: this is not the root; or the mode would change in a backward, or between
                a backward and the end of its iteration.
        """
        self._get_fsdp_state().set_manual_finalization(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends an iteration: reduces the gradients that are not reduced, and waits; of the root.

        Before the first forward it does nothing.

        Args:
            async_op: whether to return a handle, whose ``wait()`` waits. It has to be called before
                the next forward, and raises a RuntimeError after `reset_iter_state`.

        Raises:
            RuntimeError: not the root, or not after `set_manual_backward_finalization`; in a
                backward; while an earlier handle of this root, or of one that shares its streams
                (`share_comm_ctx`), was not waited for; asynchronously, while such a root has
                gradients to reduce; gradients are, or would be, reduced over shards and not over
                HSDP's replicas.

        Source: torch 2.15, torch/distributed/fsdp/_fully_shard/_fully_shard.py.
        """
        state = self._get_fsdp_state()
        reduction = None if state.is_root is None else state.finalize_backward(async_op=async_op)
        handle = _ReductionHandle(state, reduction)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether gradients are reduced; if not, they are accumulated, and nothing is sent.

        With ``placements=`` of `fully_shard`, they are reduced all the same along the axes that
        shard gradients, and accumulated as sharded gradients.
        """
        for group in self._groups(recurse):
            group.set_requires_gradient_sync(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether HSDP's replicas are reduced; if not, the shards are accumulated."""
        for group in self._groups(recurse):
            group.reduce_scatter.all_reduce_grads = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets what the sum of gradients is divided by, in place of the number of ranks.

        Raises:
            ValueError: it is not positive, or gradients wait for their all-reduce.
        """
        if not factor > 0:
            raise ValueError(
                f"set_gradient_divide_factor: expected a positive number, got {factor!r}"
            )
        for group in self._groups(recurse=False):
            group.reduce_scatter.check_not_partly_reduced("set_gradient_divide_factor")
        for group in self._groups(recurse=False):
            group.reduce_scatter.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Calls `set_gradient_divide_factor`, whose old name this is."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sets whether collectives only sum, and the mean is taken by this package.

        Raises:
            ValueError: gradients wait for their all-reduce.
        """
        for group in self._groups(recurse=False):
            group.reduce_scatter.check_not_partly_reduced("set_force_sum_reduction_for_comms")
        for group in self._groups(recurse=False):
            group.reduce_scatter.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether a parameter without a gradient counts as having zeros.

        Set it where ranks use different parameters, so that all of them reduce the same.
        """
        for group in self._groups(recurse):
            group.reduce_scatter.reduce_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Sets how many reductions may be in flight before backward waits for the oldest.

        The root's first forward takes the largest number of all modules below it, as torch does.

        Raises:
            TypeError: it is no int.
            ValueError: it is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, SupportsIndex):
            raise TypeError(
                f"set_reduce_scatter_max_input_buffers: max_input_buffers must be an int, got "
                f"{max_input_buffers!r}"
            )
        max_input_buffers = operator.index(max_input_buffers)
        if max_input_buffers < 1:
            raise ValueError(
                f"set_reduce_scatter_max_input_buffers: max_input_buffers must be a positive int, "
                f"got {max_input_buffers}"
            )
        for state in self._states(recurse):
            state.context.max_input_buffers = max_input_buffers

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Sets a hook that gets the reduced shard: flat, of the reduce dtype, changed in place.

        Args:
            hook: for replicas that the mesh does not have, or after those of HSDP were reduced.
            stream: that it runs on, by default that of the reduce-scatters.

        Raises:
            ValueError: a stream is passed, and the mesh is one of HSDP.
        """
        for group in self._groups(recurse=False):
            if stream is not None and group.mesh.ndim == 2:
                raise ValueError(
                    f"set_all_reduce_hook: stream cannot be set when using native HSDP: expected "
                    f"a mesh of one axis for {group.names}, got {tuple(group.mesh.shape)}; leave "
                    f"stream out"
                )
        for group in self._groups(recurse=False):
            group.reduce_scatter.all_reduce_hook = hook
            group.reduce_scatter.all_reduce_hook_stream = stream

    # Collectives.

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Sets torch's `AllGather` object; it allocates memory of its own, which costs a copy."""
        for group in self._groups(recurse=False):
            group.collectives.custom_all_gather = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Sets torch's `ReduceScatter` object; see `set_custom_all_gather`.

        Raises:
            ValueError: fully_shard has a ``send_dtype``.
        """
        for group in self._groups(recurse=False):
            group.collectives.check_wide("a custom reduce-scatter")
        for group in self._groups(recurse=False):
            group.collectives.custom_reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether collectives use memory of the process group, which NCCL may send faster.

        Raises:
            ValueError: another `AllGather` or `ReduceScatter` was set, or the strategy is
                "exchange", which sends and receives.
        """
        for group in self._groups(recurse=False):
            axis = group.mesh.get_group(group.mesh.ndim - 1)
            staging = _compat.collectives_of_process_group(axis) if enable else (None, None)
            group.collectives.stage(*staging)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Makes collectives use symmetric memory; every rank has to call.

        Raises:
            RuntimeError: this torch or device has none.
            ValueError: another `AllGather` or `ReduceScatter` was set.
        """
        for group in self._groups(recurse=False):
            device = group.options.device
            if device.type != "cuda":
                raise RuntimeError(
                    f"set_symm_mem_for_comm: expected parameters on CUDA, which has symmetric "
                    f"memory; {group.names} are on {device}"
                )
            axis = group.mesh.get_group(group.mesh.ndim - 1)
            staging = _compat.collectives_of_symmetric_memory(axis, backend)
            group.collectives.stage(*staging)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Sets whether reductions use a process group of their own, so that NCCL overlaps gathers.

        Every rank has to call; groups of the same ranks share one.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            if not enable:
                group.collectives.reduce_group = None
                continue
            ranks = tuple(dist.get_process_group_ranks(group.mesh.get_group(group.mesh.ndim - 1)))
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            group.collectives.reduce_group = made[ranks]

    def reset_iter_state(self) -> None:
        """Forgets an iteration in which forward or backward raised; call it on the root.

        A handle of `finalize_backward` raises afterwards.

        Raises:
            RuntimeError: this is not the root; another root that shares its streams has a handle
                that was not waited for.
        """
        self._get_fsdp_state().reset()

    # Module.

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Casts or moves the module, and copies the results into the groups' buffers."""
        for group in self._groups(recurse=True):
            group.reshard()
        # not the method of torch's FSDPModule, which needs torch's state
        original = cast(Any, super(TorchFSDPModule, self))
        groups = list(self._groups(recurse=False))
        with grads_of_own_dtype([param for group in groups for param in group.params]):
            result = original._apply(*args, **kwargs)
            for group in groups:
                group.reset_sharded_params()
        return result

    def _states(self, recurse: bool) -> Iterator[FSDPState]:
        module, seen = cast(nn.Module, self), set()
        for child in module.modules() if recurse else [module]:
            state = state_of(child)
            if state is not None and state not in seen:
                seen.add(state)
                yield state

    def _groups(self, recurse: bool) -> Iterator[FSDPParamGroup]:
        for state in self._states(recurse):
            yield from state.groups


class _UnshardHandle(UnshardHandle):
    """Waits for the all-gathers of a state, once."""

    def __init__(self, state: FSDPState) -> None:
        self._state: FSDPState | None = state

    def wait(self) -> None:
        """Makes the current stream wait; the module has its unsharded parameters then."""
        if self._state is not None:
            for group in self._state.groups:
                group.wait_for_unshard()
            self._state = None


class _ReductionHandle(GradientReductionHandle):  # type: ignore[misc]
    """Waits for a root's reductions, once.

    Args:
        state: of the root.
        reduction: what `FSDPState.finalize_backward` returned; None if there is none.
    """

    def __init__(self, state: FSDPState, reduction: object | None) -> None:
        self._state, self._reduction = state, reduction

    def wait(self) -> None:
        """Makes the current stream wait; sharded gradients are complete then.

        Raises:
            RuntimeError: `FSDPModule.reset_iter_state` has dropped the gradients.
        """
        if self._reduction is not None:
            self._state.wait_for_reduction(self._reduction)
            self._reduction = None


def set_fsdp_class(modules: Iterable[nn.Module]) -> None:
    """Changes the class of modules to a subclass of `FSDPModule` and their original class."""
    for module in modules:
        cls = type(module)
        if cls not in _fsdp_classes:
            _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        module.__class__ = _fsdp_classes[cls]


def states_of(modules: Sequence[object], method: str) -> list[FSDPState]:
    """Returns the states of modules, in their order.

    Args:
        modules: that were sharded.
        method: that got them, for the error.

    Raises:
        ValueError: one was not.
    """
    states = [state_of(m) if isinstance(m, nn.Module) else None for m in modules]
    found = [state for state in states if state is not None]
    if len(found) != len(states):
        names = [type(module).__name__ for module in modules]
        raise ValueError(
            f"{method}: expected FSDPModules, modules that fully_shard was called on, got {names}"
        )
    return found
