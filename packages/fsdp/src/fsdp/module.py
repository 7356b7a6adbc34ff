"""The methods that a sharded module has: those of `torch.distributed.fsdp.FSDPModule`."""

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
from fsdp._compat import AllGather, ReduceScatter
from fsdp.group import Group
from fsdp.state import State, state_of

__all__ = ["FSDPModule", "make_fsdp"]

_classes: dict[type, type] = {}


class FSDPModule(TorchFSDPModule):
    """What `fully_shard` makes of a module's class, in place; see torch's for each method.

    Where there is a ``recurse``, the setting holds for all sharded modules below, too.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes the module without us, so that ``type(module)(...)`` is what it was."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Buffers and process groups cannot be copied."""
        raise RuntimeError(f"fsdp: {type(self).__name__} cannot be copied; use its state dict")

    # Parameters.

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own groups; with `async_op` a handle to wait with."""
        state = self._get_fsdp_state()
        state.start_unshard()
        handle = _Unshard(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this module's own unsharded parameters, and registers the sharded ones."""
        self._get_fsdp_state().reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are freed after forward, in place of what `fully_shard` was given."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"set_reshard_after_forward: {reshard_after_forward!r}; wants True or False"
            )
        for state in self._states(recurse):
            state.auto_reshard = False
            for group in state.groups:
                group.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are freed after backward; not to saves a gather per microbatch."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether unsharded parameters keep their memory when resharded, as CUDA graphs want.

        Raises:
            ValueError: ``reshard_after_forward`` is a number: the memory would stay, for which
                larger shards are kept in its place.
        """
        for group in self._groups(recurse):
            if keep and group.reshards_to_fewer:
                raise ValueError(
                    f"set_keep_unsharded_storage: expected reshard_after_forward True or False of "
                    f"{group.names}, got a number of ranks; give fully_shard one of these, or call "
                    f"set_reshard_after_forward before"
                )
        for group in self._groups(recurse):
            group.keeps_memory = keep

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs the parameters; an embedding's does not."""
        for group in self._groups(recurse=False):
            group.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """What is gathered while this module's forward runs, instead of what came next before."""
        self._get_fsdp_state().prefetch_forward = _states_of(modules, "forward")

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """What is gathered while this module's backward runs, instead of what ran before it."""
        self._get_fsdp_state().prefetch_backward = _states_of(modules, "backward")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """What the next gathers wait for, instead of all that was issued before."""
        self._get_fsdp_state().context.post_optim_event = event

    # Gradients.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for reductions, and ends the iteration."""
        self._get_fsdp_state().context.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether no backward waits for reductions, but `finalize_backward`; of the root."""
        self._get_fsdp_state().context.ends_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Ends an iteration by hand: reduces what is left, and waits; of the root.

        Args:
            async_op: whether to return a handle, whose ``wait()`` waits.

        Raises:
            RuntimeError: not the root, or not after `set_manual_backward_finalization`.
        """
        state = self._get_fsdp_state()
        state.finalize_backward()
        handle = _Ending(state)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether gradients are reduced; if not they are added up, and nothing is sent."""
        for group in self._groups(recurse):
            group.reducer.reduce_grads = requires_gradient_sync
            group.reducer.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether HSDP's replicas are reduced; if not the shards are added up."""
        for group in self._groups(recurse):
            group.reducer.all_reduce_grads = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What the sum of gradients is divided by, instead of the number of ranks."""
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: {factor!r}; wants a positive number")
        for group in self._groups(recurse=False):
            group.reducer.check_not_partly_reduced("set_gradient_divide_factor")
        for group in self._groups(recurse=False):
            group.reducer.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives only sum, and the mean is taken here."""
        for group in self._groups(recurse=False):
            group.reducer.check_not_partly_reduced("set_force_sum_reduction_for_comms")
        for group in self._groups(recurse=False):
            group.reducer.sum_only = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether a parameter without a gradient counts as having zeros.

        Set it where ranks use different parameters, so that all of them reduce the same.
        """
        for group in self._groups(recurse):
            group.reducer.reduce_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be under way before backward waits for the oldest.

        The root's first forward takes the largest number of all modules below it, as torch does.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, SupportsIndex):
            raise TypeError(f"max_input_buffers={max_input_buffers!r}; wants an int")
        max_input_buffers = operator.index(max_input_buffers)
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers={max_input_buffers}; wants at least 1")
        for state in self._states(recurse):
            state.context.most_in_flight = max_input_buffers

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: object = None
    ) -> None:
        """Calls a hook with the reduced shard: flat, of the reduce dtype, to be changed in place.

        Raises:
            ValueError: a stream is given; the hook runs on the stream that reduces.
        """
        if stream is not None:
            raise ValueError(
                "set_all_reduce_hook: stream=; the hook runs on the stream that reduces, switch "
                "to another in it and wait there"
            )
        for group in self._groups(recurse=False):
            group.reducer.all_reduce_hook = hook

    # How data moves.

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gathers by torch's `AllGather` object, from memory of its own: a copy more than ours."""
        for group in self._groups(recurse=False):
            group.comms.all_gather_comm = comm

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduces by torch's `ReduceScatter` object, as `set_custom_all_gather`."""
        for group in self._groups(recurse=False):
            group.comms.reduce_scatter_comm = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Stages what is sent in memory of the process group's own, which NCCL may send faster.

        Raises:
            ValueError: another `AllGather` or `ReduceScatter` was set, or ``strategy="exchange"``
                sends and receives.
        """
        for group in self._groups(recurse=False):
            axis = group.mesh.get_group(group.mesh.ndim - 1)
            made = _compat.comms_of_process_group(axis) if enable else (None, None)
            group.comms.stage_by(*made)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Stages what is sent in symmetric memory; every rank has to call.

        Raises:
            RuntimeError: this torch or device has none.
            ValueError: another `AllGather` or `ReduceScatter` was set.
        """
        for group in self._groups(recurse=False):
            if group.device.type != "cuda":
                raise RuntimeError(
                    f"set_symm_mem_for_comm: {group.names} are on {group.device}; symmetric "
                    f"memory is CUDA's"
                )
            axis = group.mesh.get_group(group.mesh.ndim - 1)
            group.comms.stage_by(*_compat.comms_of_symmetric_memory(axis, backend))

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduces in a process group of its own, so that NCCL can gather meanwhile.

        Every rank has to call; groups of the same ranks share one.
        """
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            if not enable:
                group.comms.reduce_group = None
                continue
            ranks = tuple(dist.get_process_group_ranks(group.mesh.get_group(group.mesh.ndim - 1)))
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            group.comms.reduce_group = made[ranks]

    def reset_iter_state(self) -> None:
        """Forgets an iteration in which forward or backward raised; call it on the root."""
        self._get_fsdp_state().reset()

    # Module.

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Casts and moves as a module does, and takes the results into the buffers."""
        for group in self._groups(recurse=True):
            group.reshard()
        # not that of torch's FSDPModule, which would look for its own state
        original = cast(Any, super(TorchFSDPModule, self))
        result = original._apply(*args, **kwargs)
        for group in self._groups(recurse=False):
            group.adopt()
        return result

    def _get_fsdp_state(self) -> Any:
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise RuntimeError(f"fsdp: {type(self).__name__} has no state; fully_shard was undone")
        return state

    def _states(self, recurse: bool) -> Iterator[State]:
        module, seen = cast(nn.Module, self), set()
        for child in module.modules() if recurse else [module]:
            state = state_of(child)
            if state is not None and state not in seen:
                seen.add(state)
                yield state

    def _groups(self, recurse: bool) -> Iterator[Group]:
        for state in self._states(recurse):
            yield from state.groups


class _Unshard(UnshardHandle):
    """Waits for a state's gathers, once."""

    def __init__(self, state: State) -> None:
        self._state: State | None = state

    def wait(self) -> None:
        """Makes the current stream wait; the module has its unsharded parameters then."""
        if self._state is not None:
            for group in self._state.groups:
                group.wait_for_unshard()
            self._state = None


class _Ending(UnshardHandle):
    """Waits for a root's reductions, once."""

    def __init__(self, state: State) -> None:
        self._state: State | None = state

    def wait(self) -> None:
        """Makes the current stream wait; gradients are whole then."""
        if self._state is not None:
            self._state.end_iteration()
            self._state = None


def make_fsdp(modules: Iterable[nn.Module]) -> None:
    """Puts `FSDPModule` in front of the classes of modules."""
    for module in modules:
        cls = type(module)
        if cls not in _classes:
            _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
        module.__class__ = _classes[cls]


def _states_of(modules: Sequence[object], what: str) -> list[State]:
    states = [state_of(m) if isinstance(m, nn.Module) else None for m in modules]
    found = [state for state in states if state is not None]
    if len(found) != len(states):
        names = [type(module).__name__ for module in modules]
        raise ValueError(
            f"set_modules_to_{what}_prefetch: {names}; wants modules that fully_shard was called on"
        )
    return found
