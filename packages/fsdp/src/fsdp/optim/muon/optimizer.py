"""Muon on sharded parameters: each matrix is orthogonalized by one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp.optim.matrix.assignment import MatrixTask, OwnerPlan, OwnerPlanner
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import Matrix, matrices_of
from fsdp.optim.matrix.optimizer import MatrixOptimizer, ParamGroup
from fsdp.optim.matrix.split import SplitOption
from fsdp.optim.muon.newton_schulz import (
    COEFFICIENTS,
    NsCoefficients,
    adjusted_lr,
    check_lr_adjustment,
    newton_schulz,
    newton_schulz_cost,
)
from fsdp.optim.tensors import local_of, subtract_

__all__ = ["Muon"]


@dataclass(frozen=True, eq=False)
class _MuonParam:
    """The flat local tensors of a parameter in a step, and its group."""

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    group: ParamGroup


class Muon(MatrixOptimizer):
    """`torch.optim.Muon` for parameters that `fully_shard` has sharded, and AdamW for the others.

    Each matrix is orthogonalized by one rank of the axis that shards it, its owner: update
    directions are sent to it in bfloat16, the dtype of the iteration, and returned orthogonalized.
    Owners are chosen to balance the work over ranks and, within that, to have most of the matrix.
    A matrix that `Whole()` has placed on one rank is owned by that rank, and a step sends nothing.
    Plain and replicated parameters are orthogonalized by all ranks.

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
        split: which rows of a parameter are separate matrices, such as heads or fused projections:
            the number of matrices, the rows of each, or a function of the parameter that returns
            one of these; or a mapping from regular expressions to these, such as
            ``{r".*qkv_proj\\.weight": 3}``. An expression has to match the whole name of at least
            one parameter; parameters that none matches are one matrix each.
        bucket_mb: size of the matrices that are exchanged at the same time, in MiB of bfloat16.

    Raises:
        ValueError: an option is out of range; a parameter is not a matrix, or `split` does not fit
            it: the error names the parameter; or a pattern of `split` matches no parameter.
    """

    optimizer_name = "Muon"

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
        split: SplitOption = None,
        bucket_mb: float = 25.0,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults, split, bucket_mb)

    def _check_options(self, group: ParamGroup) -> None:
        _check_options(group)

    def _planner(self) -> OwnerPlanner:
        return OwnerPlanner(self._matrices_of, newton_schulz_cost, "per_step")

    def _matrices_of(self, param: torch.Tensor) -> list[Matrix]:
        return matrices_of(param, self._rows[param], self._names[param], self.optimizer_name)

    def _step_matrices(self, plan: OwnerPlan) -> None:
        params = {
            index: self._muon_param(param, group)
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
            group = params[plan.param_index(task)].group
            return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def apply(task: MatrixTask, update: torch.Tensor) -> None:
            one, shape = params[plan.param_index(task)], task.matrix.shape
            lr = adjusted_lr(float(one.group["lr"]), one.group["adjust_lr_fn"], shape)
            subtract_(one.param[task.matrix.local_slice], update, lr)

        bucket_elements = self._bucket_bytes // torch.bfloat16.itemsize
        compute_on_owners(plan.tasks, direction, orthogonalize, apply, bucket_elements)

    def _muon_param(self, param: torch.Tensor, group: ParamGroup) -> _MuonParam:
        grad, state = self._local_grad(param), self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = local_of(state["momentum_buffer"])
        return _MuonParam(local_of(param).view(-1), grad, momentum.view(-1), group)


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
