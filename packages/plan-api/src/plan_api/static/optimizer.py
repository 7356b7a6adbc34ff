"""Steps optimizers of DTensor parameters on local tensors.

An elementwise optimizer computes the same on a shard as on the full tensor, so during `step()` its
parameters are swapped for local parameters, and the DTensors of its state for their local tensors.
Before and after the step it has DTensors in both, as checkpoints require. Other optimizers (Muon,
Adafactor, LBFGS) read whole matrices, and step on DTensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim
from torch.distributed.tensor import DTensor
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
_stepping: weakref.WeakKeyDictionary[optim.Optimizer, _SwappedOut] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
_hooks: list[RemovableHandle] = []


@dataclass(slots=True)  # not frozen, which takes longer to construct
class _Swap:
    """A parameter swapped for its local parameter.

    Attributes:
        param: the DTensor.
        local_param: the local parameter.
        state: the parameter's state outside of `step()`; None if it has none yet.
    """

    param: torch.Tensor
    local_param: LocalParam
    state: dict[str, Any] | None


@dataclass(frozen=True)
class _SwappedOut:
    """What an optimizer holds outside of `step()`.

    Attributes:
        params: the parameters of each group.
        state: the state by parameter.
        swaps: the parameters that are swapped.
    """

    params: list[list[torch.Tensor]]
    state: dict[torch.Tensor, Any]
    swaps: list[_Swap]


def step_on_local_params(local_params: Iterable[LocalParam]) -> None:
    """Makes every elementwise optimizer, existing or future, step on these local parameters.

    The first call registers hooks for the steps of all optimizers of the process
    (`remove_step_hooks` removes them).

    Args:
        local_params: only weak references to them are held.
    """
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
    for optimizer in list(_stepping):
        _swap_out(optimizer, (), {})


def _swap_in(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer in _stepping:  # the previous step raised
        _swap_out(optimizer, (), {})
    if type(optimizer) not in _ELEMENTWISE or len(args) > 1 or kwargs.get("closure") is not None:
        return  # a closure runs backward inside of the step
    state = optimizer.state
    local_state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    swaps: list[_Swap] = []
    groups: list[list[torch.Tensor]] = []
    # Looking tensors up in a dict is slow: once for each has to do.
    for group in optimizer.param_groups:
        groups.append(tensors := [])
        for param in group["params"]:
            local_param, own = _local_param(param), state.get(param)
            tensor = param if local_param is None else local_param.tensor
            tensors.append(tensor)
            if local_param is not None:
                swaps.append(_Swap(param, local_param, own))
                _swap_in_gradient(param, local_param)
            if own is not None:
                local_state[tensor] = own if local_param is None else _local(own)
    if not swaps:
        return
    if len(local_state) != len(state):  # state that belongs to no parameter
        swapped = {swap.param for swap in swaps}
        local_state.update({key: own for key, own in state.items() if key not in swapped})
    params = [group["params"] for group in optimizer.param_groups]
    _stepping[optimizer] = _SwappedOut(params, state, swaps)
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_pre_hook(lambda own: _swap_out(own, (), {}))
    optimizer.state = local_state
    for group, tensors in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = tensors


def _swap_in_gradient(param: torch.Tensor, local_param: LocalParam) -> None:
    grad = param.grad
    if isinstance(grad, DTensor):
        if grad.placements != local_param.param.placements:
            grad = grad.redistribute(placements=local_param.param.placements)
        local_param.tensor.grad = grad._local_tensor


def _local(state: dict[str, Any]) -> dict[str, Any]:
    local = state.copy()
    for name, one in state.items():
        if isinstance(one, DTensor):
            local[name] = one._local_tensor
    return local


def _swap_out(optimizer: optim.Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    swapped_out = _stepping.pop(optimizer, None)
    if swapped_out is None:
        return
    local_state: Any = optimizer.state
    for group, params in zip(optimizer.param_groups, swapped_out.params, strict=True):
        group["params"] = params
    optimizer.state = swapped_out.state  # type: ignore[assignment]
    for swap in swapped_out.swaps:
        tensor = swap.local_param.tensor
        if tensor.grad is None:  # zero_grad(), after a step that raised
            swap.param.grad = None
        tensor.grad = None
        if (local := local_state.pop(tensor, None)) is not None:
            state = swapped_out.state[swap.param] if swap.state is None else swap.state
            _update_state(state, local, swap.local_param)
    swapped_out.state.update(local_state)


def _update_state(state: dict[str, Any], local: dict[str, Any], local_param: LocalParam) -> None:
    """Updates the state of a parameter from local tensors, which become DTensors."""
    spec = local_param.param._spec
    for name, after in local.items():
        before = state.get(name)
        if before is after or (isinstance(before, DTensor) and before._local_tensor is after):
            continue
        is_sharded = (
            isinstance(after, torch.Tensor)
            and after.shape == local_param.tensor.shape
            and name != "step"
        )
        state[name] = (
            DTensor(after, spec_with_dtype(spec, after.dtype), requires_grad=False)
            if is_sharded
            else after
        )


def _local_param(param: torch.Tensor) -> LocalParam | None:
    found = _local_params.get(id(param))
    return found if found is not None and found.param is param and found.is_current else None
