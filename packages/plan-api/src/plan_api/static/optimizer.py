"""Steps optimizers of DTensor parameters on local tensors.

An elementwise optimizer computes the same on a shard as on the full tensor, so during `step()` its
parameters are swapped for local parameters, and the DTensors of its state for their local tensors.
Before and after the step it has DTensors in both, as checkpoints require. A swap is prepared once,
and again after parameters or state have been replaced, as `load_state_dict` does. Other optimizers
(Muon, Adafactor, LBFGS) read whole matrices, and step on DTensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from plan_api.runtime.local_shards import spec_with_dtype
from plan_api.static.local_params import LocalParam

__all__ = ["remove_step_hooks", "restore_interrupted_steps", "step_on_local_params"]

_ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip

_local_params: weakref.WeakValueDictionary[int, LocalParam] = weakref.WeakValueDictionary()
_swaps: weakref.WeakKeyDictionary[optim.Optimizer, _Swap] = weakref.WeakKeyDictionary()
_stepping: list[weakref.ref[optim.Optimizer]] = []
_watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
_hooks: list[RemovableHandle] = []
_registrations = 0  # how often local parameters have been registered


class _SwappedParam(NamedTuple):
    """A parameter, and the local parameter with its placements."""

    param: Any
    tensor: torch.Tensor
    placements: tuple[Placement, ...]


class _Group(NamedTuple):
    """The list of a group's parameters, what it contains, and the list that replaces it."""

    params: list[torch.Tensor]
    contents: tuple[torch.Tensor, ...]
    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class _Swap:
    """What an optimizer has outside of `step()`, and what inside.

    Attributes:
        groups: the lists of parameters.
        params: those that are swapped.
        local_tensors: their local tensors.
        state: outside.
        local_state: inside, with local tensors of the same memory.
        values: all that is in `state`, as it was when it was swapped.
        local_values: all that is in `local_state`.
        registrations: how often local parameters had been registered.
        is_reusable: whether the next step may use it, if nothing has been replaced.
    """

    groups: list[_Group]
    params: list[_SwappedParam]
    local_tensors: list[torch.Tensor]
    state: dict[torch.Tensor, Any]
    local_state: dict[torch.Tensor, Any]
    values: list[Any]
    local_values: list[Any]
    registrations: int
    is_reusable: bool

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether nothing has been replaced since it was made."""
        groups = optimizer.param_groups
        return (
            self.is_reusable
            and self.registrations == _registrations
            and optimizer.state is self.state
            and len(groups) == len(self.groups)
            and all(
                group["params"] is params and _are_same(params, contents)
                for group, (params, contents, _) in zip(groups, self.groups, strict=True)
            )
            and _are_same([one.param._local_tensor for one in self.params], self.local_tensors)
            and _are_same(_values(self.state), self.values)
        )


def step_on_local_params(local_params: Iterable[LocalParam]) -> None:
    """Makes every elementwise optimizer, existing or future, step on these local parameters.

    The first call registers hooks for the steps of all optimizers of the process
    (`remove_step_hooks` removes them).

    Args:
        local_params: only weak references to them are held.
    """
    global _registrations
    _registrations += 1
    for local_param in local_params:
        _local_params[id(local_param.param)] = local_param
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_swap_in))
        _hooks.append(register_optimizer_step_post_hook(_swap_out))


def remove_step_hooks() -> None:
    """Makes optimizers step on DTensors again."""
    restore_interrupted_steps()
    while _hooks:
        _hooks.pop().remove()


def restore_interrupted_steps() -> None:
    """Restores the DTensors of optimizers whose last step raised; to be called between steps."""
    while _stepping:
        optimizer = _stepping[-1]()
        if optimizer is None:
            _stepping.pop()
        else:
            _swap_out(optimizer, (), {})


def _swap_in(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _restore(optimizer)  # if the previous step raised
    if type(optimizer) not in _ELEMENTWISE or len(args) > 1 or kwargs.get("closure") is not None:
        return  # a closure runs backward inside of the step
    swap = _swaps.get(optimizer)
    if swap is None or not swap.fits(optimizer):
        _swaps[optimizer] = swap = _new_swap(optimizer)
    if not swap.params:
        return
    # One operation for all, and then the next: between others each takes twice the time.
    grads = [one.param.grad for one in swap.params]
    for (_, tensor, placements), grad in zip(swap.params, grads, strict=True):
        if isinstance(grad, DTensor):
            if grad._spec.placements != placements:
                grad = grad.redistribute(placements=placements)
            tensor.grad = grad._local_tensor
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_pre_hook(_restore)
        optimizer.register_load_state_dict_pre_hook(_forget)
    _stepping.append(weakref.ref(optimizer))
    optimizer.state = swap.local_state  # type: ignore[assignment]
    for group, own in zip(optimizer.param_groups, swap.groups, strict=True):
        group["params"] = own.tensors


def _new_swap(optimizer: optim.Optimizer) -> _Swap:
    state: dict[torch.Tensor, Any] = optimizer.state
    local_state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    swapped: list[_SwappedParam] = []
    groups: list[_Group] = []
    is_reusable = True
    for group in optimizer.param_groups:
        groups.append(_Group(group["params"], (*group["params"],), tensors := []))
        for param in group["params"]:
            local_param, own, tensor = _local_params.get(id(param)), state.get(param), param
            if local_param is not None and local_param.param is param:
                if local_param.is_current:
                    tensor = local_param.tensor
                    swapped.append(_SwappedParam(param, tensor, local_param.param.placements))
                else:
                    is_reusable = False  # the next forward makes it current
            tensors.append(tensor)
            if own is not None:
                local_state[tensor] = own if tensor is param else _local_values(own)
    if len(local_state) != len(state):  # state that belongs to no parameter
        is_reusable = False
        params = {param for group in groups for param in group.params}
        local_state.update({key: own for key, own in state.items() if key not in params})
    values, local_values = (_values(state), _values(local_state)) if is_reusable else ([], [])
    local_tensors = [one.param._local_tensor for one in swapped]
    return _Swap(
        groups, swapped, local_tensors, state, local_state, values, local_values, _registrations,
        is_reusable,
    )  # fmt: skip


def _local_values(state: dict[str, Any]) -> dict[str, Any]:
    local = state.copy()
    for name, one in state.items():
        if isinstance(one, DTensor):
            local[name] = one._local_tensor
    return local


def _swap_out(optimizer: optim.Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    _restore(optimizer)


def _restore(optimizer: optim.Optimizer) -> None:
    """Gives an optimizer its DTensors, if it has local parameters."""
    reference = weakref.ref(optimizer)
    if reference not in _stepping:
        return
    _stepping.remove(reference)
    swap, local_state = _swaps[optimizer], optimizer.state
    for group, own in zip(optimizer.param_groups, swap.groups, strict=True):
        group["params"] = own.params
    optimizer.state = swap.state  # type: ignore[assignment]
    for param, tensor, _ in swap.params:
        if tensor.grad is None:  # zero_grad(), after a step that raised
            param.grad = None
        tensor.grad = None
    if swap.is_reusable and _are_same(_values(local_state), swap.local_values):
        return
    del _swaps[optimizer]
    for param, tensor, _ in swap.params:
        if (local := local_state.pop(tensor, None)) is not None:
            _update_state(swap.state[param], local, param, tensor)
    swap.state.update(local_state)


def _forget(optimizer: optim.Optimizer, _: dict[str, Any]) -> None:
    """Releases the state that `load_state_dict` is about to replace."""
    _restore(optimizer)
    _swaps.pop(optimizer, None)


def _update_state(
    state: dict[str, Any], local: dict[str, Any], param: Any, tensor: torch.Tensor
) -> None:
    """Updates the state of a parameter from local tensors, which become DTensors."""
    spec = param._spec
    for name, after in local.items():
        before = state.get(name)
        if before is after or (isinstance(before, DTensor) and before._local_tensor is after):
            continue
        is_sharded = (
            isinstance(after, torch.Tensor) and after.shape == tensor.shape and name != "step"
        )
        state[name] = (
            DTensor(after, spec_with_dtype(spec, after.dtype), requires_grad=False)
            if is_sharded
            else after
        )


def _values(state: Mapping[torch.Tensor, dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether both have the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
