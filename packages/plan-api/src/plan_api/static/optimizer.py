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
from torch.utils.hooks import RemovableHandle

from plan_api.static.leaves import Leaf

__all__ = ["mend_steps", "remove_step_hooks", "step_on_leaves"]

_ELEMENTWISE = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax,
        optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip

_leaves: weakref.WeakValueDictionary[int, Leaf] = weakref.WeakValueDictionary()
_stepping: weakref.WeakKeyDictionary[optim.Optimizer, _Lent] = weakref.WeakKeyDictionary()
_watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
_hooks: list[RemovableHandle] = []


@dataclass(slots=True)  # not frozen, for that takes longer to make
class _Loan:
    """A leaf, lent for its parameter.

    Attributes:
        param: the DTensor.
        leaf: the parameter's.
        state: of the parameter, as the optimizer shows it; None if it has none yet.
    """

    param: torch.Tensor
    leaf: Leaf
    state: dict[str, Any] | None


@dataclass(frozen=True)
class _Lent:
    """What an optimizer has while it does not step.

    Attributes:
        params: of each group.
        state: by parameter.
        loans: of leaves.
    """

    params: list[list[torch.Tensor]]
    state: dict[torch.Tensor, Any]
    loans: list[_Loan]


def step_on_leaves(leaves: Iterable[Leaf]) -> None:
    """Lets every elementwise optimizer, made or yet to be made, step on these.

    The first call registers hooks for the steps of all optimizers of the process
    (`remove_step_hooks`).

    Args:
        leaves: of parameters; as long as they live.
    """
    for leaf in leaves:
        _leaves[id(leaf.param)] = leaf
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_lend))
        _hooks.append(register_optimizer_step_post_hook(_give_back))


def remove_step_hooks() -> None:
    """Lets optimizers step on DTensors again."""
    mend_steps()
    while _hooks:
        _hooks.pop().remove()


def mend_steps() -> None:
    """Gives DTensors back to optimizers whose last step has raised; no other one is stepping."""
    for optimizer in list(_stepping):
        _give_back(optimizer, (), {})


def _lend(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if optimizer in _stepping:  # the step before this one has raised
        _give_back(optimizer, (), {})
    if type(optimizer) not in _ELEMENTWISE or len(args) > 1 or kwargs.get("closure") is not None:
        return  # a closure runs backward while the optimizer steps
    shown = optimizer.state
    local: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    loans: list[_Loan] = []
    given: list[list[torch.Tensor]] = []
    # Tensors are slow to look up in a dict: once for each is enough.
    for group in optimizer.param_groups:
        given.append(tensors := [])
        for param in group["params"]:
            leaf, state = _leaf(param), shown.get(param)
            tensor = param if leaf is None else leaf.tensor
            tensors.append(tensor)
            if leaf is not None:
                loans.append(_Loan(param, leaf, state))
                _lend_gradient(param, leaf)
            if state is not None:
                local[tensor] = state if leaf is None else _local(state)
    if not loans:
        return
    if len(local) != len(shown):  # what is of no parameter
        lent = {loan.param for loan in loans}
        local.update({key: state for key, state in shown.items() if key not in lent})
    params = [group["params"] for group in optimizer.param_groups]
    _stepping[optimizer] = _Lent(params, shown, loans)
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_pre_hook(lambda own: _give_back(own, (), {}))
    optimizer.state = local
    for group, tensors in zip(optimizer.param_groups, given, strict=True):
        group["params"] = tensors


def _lend_gradient(param: torch.Tensor, leaf: Leaf) -> None:
    grad = param.grad
    if isinstance(grad, DTensor):
        if grad.placements != leaf.param.placements:
            grad = grad.redistribute(placements=leaf.param.placements)
        leaf.tensor.grad = grad._local_tensor


def _local(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: one._local_tensor if isinstance(one, DTensor) else one for name, one in state.items()
    }


def _give_back(optimizer: optim.Optimizer, _: tuple[Any, ...], __: dict[str, Any]) -> None:
    lent = _stepping.pop(optimizer, None)
    if lent is None:
        return
    local: Any = optimizer.state
    for group, own in zip(optimizer.param_groups, lent.params, strict=True):
        group["params"] = own
    optimizer.state = lent.state  # type: ignore[assignment]
    for loan in lent.loans:
        tensor = loan.leaf.tensor
        if tensor.grad is None:  # zero_grad(), after a step that has raised
            loan.param.grad = None
        tensor.grad = None
        if (state := local.pop(tensor, None)) is not None:
            _show(state, lent.state[loan.param] if loan.state is None else loan.state, loan.leaf)
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
