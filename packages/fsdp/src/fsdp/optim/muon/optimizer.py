"""Muon on sharded parameters: each matrix is orthogonalized by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp.optim.matrix.assignment import MatrixTask, OwnerPlan, OwnerPlanner, Owners
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import Matrix, matrices_of
from fsdp.optim.matrix.optimizer import MatrixOptimizer, ParamGroup
from fsdp.optim.matrix.split import SplitOption
from fsdp.optim.muon.compiled import Backend, CompiledNewtonSchulz, check_backend
from fsdp.optim.muon.newton_schulz import (
    COEFFICIENTS,
    NsCoefficients,
    adjusted_lr,
    check_lr_adjustment,
    newton_schulz,
    newton_schulz_cost,
)
from fsdp.optim.muon.normuon import (
    SECOND_MOMENTUM,
    check_second_momentum,
    new_second_momentum,
    normalize_rows,
    second_momentum_name,
)
from fsdp.optim.state_dict import check_state_sharding, unwrap_tensors, wrap_tensors
from fsdp.optim.tensors import local_of, subtract_

__all__ = ["Muon"]


@dataclass(frozen=True, eq=False)
class _MuonParam:
    """The flat local tensors of a parameter in a step, its state and its group.

    Attributes:
        first_matrix: index of its first matrix in the plan.
    """

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    state: dict[str, Any]
    group: ParamGroup
    first_matrix: int


class Muon(MatrixOptimizer):
    """`torch.optim.Muon` for parameters that `fully_shard` has sharded, and AdamW for the others.

    Each matrix is orthogonalized by one rank of the axis that shards it, its owner: update
    directions are sent to it in bfloat16, the dtype of the iteration, and returned orthogonalized.
    Owners are chosen to balance the work over ranks and, within that, to have most of the matrix.
    A matrix that `Whole()` has placed on one rank is owned by that rank, and a step sends nothing.
    Plain and replicated parameters are orthogonalized by all ranks.

    With `normuon_beta2` it is NorMuon: the owner divides each row of the orthogonalized matrix by
    the root of the running mean of the row's mean square, and scales the result to the norm that
    the matrix had. The running means, one number per row and matrix, are on the owner, so owners
    do not change then. They have float32 or, for float64 parameters, float64; the result is rounded
    to bfloat16, in which it is sent.

    State dicts are those of `torch.optim.Muon` for groups of matrices, and of AdamW for others:
    either loads the other's. The momentum is placed as the parameter. Options that a state dict
    does not have are unchanged; row statistics that it does not have start at zero.

    Args:
        params: parameters or groups of them, with names or without; with ``named_parameters()``
            errors have the names. As for torch's Muon these are the matrices of hidden layers:
            embeddings, output layers, norms and biases go into a group with ``use_muon=False``,
            which takes the options of AdamW. A parameter of 3 dims is a stack of matrices, such as
            one for each expert.
        lr: learning rate, the default of the groups; may be a tensor of one element.
        weight_decay: decoupled weight decay, the default of the groups.
        momentum: factor of the running mean of gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: coefficients of the Newton-Schulz polynomial.
        eps: lower bound of the norm that a matrix is divided by. AdamW has its own eps.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: how the learning rate of a matrix depends on its shape: None or "original",
            Keller Jordan's ``max(1, rows / columns) ** 0.5``, or "match_rms_adamw", Moonlight's
            ``0.2 * max(rows, columns) ** 0.5``. As in torch, it is not a function.
        normuon_beta2: decay rate of NorMuon's running means, 0.95 in the paper; None is Muon.
        split: which rows of a parameter are separate matrices, such as heads or fused projections:
            the number of matrices, the rows of each, or a function of the parameter that returns
            one of these; or a mapping from regular expressions to these, such as
            ``{".*qkv_proj.weight": 3}``. An expression has to match the whole name of at least
            one parameter; parameters that none matches are one matrix each.
        compile_backend: backend of `torch.compile`, such as "inductor", for the Newton-Schulz
            iteration, which is compiled once for each shape of a matrix; None does not compile.
            A backend that fuses operations, as inductor does, may compute other bits.
        bucket_mb: size of the matrices that are exchanged at the same time, in MiB of bfloat16.

    Raises:
        ValueError: an option is out of range; a parameter is not a matrix, or `split` does not fit
            it: the error names the parameter; or a pattern of `split` matches no parameter.

    Source: torch/optim/_muon.py; NorMuon: Li et al., arXiv 2510.05491, and
        github.com/microsoft/dion, dion/normuon.py.
    """

    optimizer_name = "Muon"
    additional_options = ("normuon_beta2",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: NsCoefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        normuon_beta2: float | None = None,
        split: SplitOption = None,
        compile_backend: Backend | None = None,
        bucket_mb: float = 25.0,
    ) -> None:
        check_backend(compile_backend)
        self._newton_schulz = (
            newton_schulz if compile_backend is None else CompiledNewtonSchulz(compile_backend)
        )
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "normuon_beta2": normuon_beta2,
        }  # fmt: skip
        super().__init__(params, defaults, split, bucket_mb)

    def _check_options(self, group: ParamGroup) -> None:
        _check_options(group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch's optimizers do, or one of `torch.optim.Muon`.

        Raises:
            ValueError: state is sharded differently from its parameter, or is that of other
                matrices; it names the parameter, and the optimizer is unchanged.
        """
        hook = partial(wrap_tensors, prefix=SECOND_MOMENTUM)
        last = self.register_load_state_dict_pre_hook(hook)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _planner(self) -> OwnerPlanner:
        is_normuon = any(group.get("normuon_beta2") is not None for group in self.param_groups)
        owners: Owners = "persistent" if is_normuon else "per_step"
        return OwnerPlanner(self._matrices_of, newton_schulz_cost, owners)

    def _matrices_of(self, param: torch.Tensor) -> list[Matrix]:
        return matrices_of(param, self._rows[param], self._names[param], self.optimizer_name)

    def _step_matrices(self, plan: OwnerPlan) -> None:
        tasks = plan.tasks_by_param()
        params = {
            index: self._muon_param(param, group, tasks.get(index, []))
            for index, (param, group) in enumerate(self._matrix_params())
            if param.grad is not None
        }
        for one in params.values():  # not torch._foreach_lerp_: its bits differ in bfloat16
            one.momentum.lerp_(one.grad, 1 - one.group["momentum"])
            one.param.mul_(1 - float(one.group["lr"]) * one.group["weight_decay"])

        def direction(task: MatrixTask) -> torch.Tensor:
            one, elements = params[plan.param_index(task)], task.matrix.local_slice
            grad, momentum = one.grad[elements], one.momentum[elements]
            if one.group["nesterov"]:
                momentum = grad.lerp(momentum, one.group["momentum"])
            return momentum.bfloat16()

        def orthogonalize(task: MatrixTask, matrix: torch.Tensor) -> torch.Tensor:
            one = params[plan.param_index(task)]
            group, beta2 = one.group, one.group.get("normuon_beta2")
            update = self._newton_schulz(
                matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            if beta2 is None:
                return update
            name = second_momentum_name(task.index - one.first_matrix)
            return normalize_rows(update, local_of(one.state[name]), beta2)

        def apply(task: MatrixTask, update: torch.Tensor) -> None:
            one, shape = params[plan.param_index(task)], task.matrix.shape
            lr = adjusted_lr(float(one.group["lr"]), one.group["adjust_lr_fn"], shape)
            subtract_(one.param[task.matrix.local_slice], update, lr)

        bucket_elements = self._bucket_bytes // torch.bfloat16.itemsize
        compute_on_owners(plan.tasks, direction, orthogonalize, apply, bucket_elements)

    def _muon_param(
        self, param: torch.Tensor, group: ParamGroup, tasks: list[MatrixTask]
    ) -> _MuonParam:
        grad, state = self._local_grad(param), self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        if group.get("normuon_beta2") is not None and second_momentum_name(0) not in state:
            device, name = local_of(param).device, self._names[param]
            state.update(new_second_momentum(param, tasks, device, name))
        momentum, first = local_of(state["momentum_buffer"]), tasks[0].index if tasks else 0
        return _MuonParam(local_of(param).view(-1), grad, momentum.view(-1), state, group, first)

    def _check_state(self) -> None:
        for param, state in self.state.items():
            self.state[param] = unwrap_tensors(state, param)
        params = [param for param, _ in self._matrix_params()]
        indices = {param: index for index, param in enumerate(params)}
        placed_as_params, tasks = {}, None
        for param, state in self.state.items():
            placed_as_params[param] = {
                key: value for key, value in state.items() if not key.startswith(SECOND_MOMENTUM)
            }
            if len(placed_as_params[param]) < len(state):
                tasks = tasks or self._plan().tasks_by_param()
                own = tasks.get(indices.get(param, -1), [])
                check_second_momentum(state, param, own, self._names[param])
        check_state_sharding(placed_as_params, self._names, self.optimizer_name)


def _check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError if an option of a group of matrices is out of range."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"Muon: expected lr to have one element, got {lr.numel()}")
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not float(group[name]) >= 0:
            raise ValueError(f"Muon: expected {name} to be 0 or more, got {group[name]}")
    if not 1 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon: expected ns_steps to be 1 to 99, got {group['ns_steps']}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(
            f"Muon: expected ns_coefficients to be three numbers, got {group['ns_coefficients']}"
        )
    check_lr_adjustment(group["adjust_lr_fn"])
    beta2 = group["normuon_beta2"]
    if beta2 is not None and not 0 <= beta2 < 1:
        raise ValueError(f"Muon: expected normuon_beta2 to be None or 0 to below 1, got {beta2}")
