"""Optimizers of parameters that are DTensors, stepping on their local tensors.

An optimizer that works on each element by itself does the same on a shard as on the whole, so for
the time of `step()` it is given leaves for parameters, and local tensors for its state. Before and
after it has DTensors in both, as checkpoints need them. Others (Muon, Adafactor, LBFGS) look at
whole tensors, and step on DTensors, as they do without this.
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

from plan_api.static.leaves import Leaf

__all__ = ["mend_steps", "step_on_leaves"]

_ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip

_leaves: weakref.WeakValueDictionary[int, Leaf] = weakref.WeakValueDictionary()
_stepping: weakref.WeakKeyDictionary[optim.Optimizer, _Lent] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
_registered = False


@dataclass(frozen=True)
class _Lent:
    """What an optimizer has while it does not step.

    Attributes:
        params: of each group.
        state: by parameter.
        leaves: that it was given, of their parameters.
    """

    params: list[list[torch.Tensor]]
    state: dict[torch.Tensor, Any]
    leaves: list[tuple[torch.Tensor, Leaf]]


def step_on_leaves(leaves: Iterable[Leaf]) -> None:
    """Lets every elementwise optimizer, made or yet to be made, step on these.

    Args:
        leaves: of parameters; as long as they live.
    """
    global _registered
    for leaf in leaves:
        _leaves[id(leaf.param)] = leaf
    if not _registered:
        _registered = True
        register_optimizer_step_pre_hook(_lend)
        register_optimizer_step_post_hook(_give_back)


def mend_steps() -> None:
    """Gives DTensors back to optimizers whose last step has raised; no other one is stepping."""
    for optimizer in list(_stepping):
        _give_back(optimizer, (), {})


def _lend(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer in _stepping:  # the step before this one has raised
        _give_back(optimizer, (), {})
    if type(optimizer) not in _ELEMENTWISE or len(args) > 1 or kwargs.get("closure") is not None:
        return  # a closure runs backward while the optimizer steps
    groups = optimizer.param_groups
    params: list[list[torch.Tensor]] = [group["params"] for group in groups]
    found = [(param, leaf) for group in params for param in group if (leaf := _leaf(param))]
    if not found:
        return
    of_param = {param: leaf.tensor for param, leaf in found}
    for param, leaf in found:
        if isinstance(grad := param.grad, DTensor):
            if grad.placements != leaf.param.placements:
                grad = grad.redistribute(placements=leaf.param.placements)
            leaf.tensor.grad = grad._local_tensor
    _stepping[optimizer] = _Lent(params, optimizer.state, found)
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_pre_hook(lambda own: _give_back(own, (), {}))
    local: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for param, held in optimizer.state.items():
        if param in of_param:
            local[of_param[param]] = {
                name: one._local_tensor if isinstance(one, DTensor) else one
                for name, one in held.items()
            }
        else:
            local[param] = held
    optimizer.state = local
    for group, own in zip(groups, params, strict=True):
        group["params"] = [of_param.get(param, param) for param in own]


def _give_back(optimizer: optim.Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    lent = _stepping.pop(optimizer, None)
    if lent is None:
        return
    local: Any = optimizer.state
    for group, own in zip(optimizer.param_groups, lent.params, strict=True):
        group["params"] = own
    optimizer.state = lent.state  # type: ignore[assignment]
    for param, leaf in lent.leaves:
        if leaf.tensor.grad is None:  # zero_grad(), after a step that has raised
            param.grad = None
        leaf.tensor.grad = None
        if leaf.tensor in local:
            _show(local.pop(leaf.tensor), lent.state[param], leaf)
    lent.state.update(local)


def _show(local: dict[str, Any], shown: dict[str, Any], leaf: Leaf) -> None:
    """Puts a state's local tensors into the state that the optimizer shows, as DTensors."""
    for name, now in local.items():
        before = shown.get(name)
        if before is now or (isinstance(before, DTensor) and before._local_tensor is now):
            continue
        placed = isinstance(now, torch.Tensor) and now.shape == leaf.tensor.shape and name != "step"
        shown[name] = DTensor(now, _spec(leaf, now), requires_grad=False) if placed else now


def _spec(leaf: Leaf, tensor: torch.Tensor) -> Any:
    spec = leaf.param._spec
    if tensor.dtype == spec.tensor_meta.dtype:
        return spec
    meta = type(spec.tensor_meta)(spec.shape, spec.stride, tensor.dtype)
    return type(spec)(spec.mesh, spec.placements, tensor_meta=meta)


def _leaf(param: torch.Tensor) -> Leaf | None:
    leaf = _leaves.get(id(param))
    return leaf if leaf is not None and leaf.param is param else None
