"""Muon on sharded parameters: each matrix is orthogonalized by one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.optimizer import ParamsT

from fsdp.optim.muon.newton_schulz import (
    COEFFICIENTS,
    Coefficients,
    adjusted_lr,
    newton_schulz,
    work_of,
)
from fsdp.optim.muon.settings import check_options
from fsdp.optim.owned.jobs import Job
from fsdp.optim.owned.matrices import Matrix, Split, SplitFunction, matrices_of
from fsdp.optim.owned.optimizer import Group, MatrixOptimizer
from fsdp.optim.owned.visit import visit_owners
from fsdp.optim.owned.work import Planner, Work
from fsdp.optim.tensors import local_of, subtract_

__all__ = ["Muon"]


@dataclass(frozen=True, eq=False)
class _Local:
    """What this rank has of a parameter in a step, flat, and its group."""

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    group: Group


class Muon(MatrixOptimizer):
    """`torch.optim.Muon` for parameters that `fully_shard` has cut, and AdamW for the others.

    Every matrix is iterated on by one rank of the axis that cuts it: directions travel to it in
    bfloat16, in which they are iterated on anyway, and come back orthogonalized. Work is balanced
    over the ranks, and matrices go where most of them is. What `Whole()` has put on one rank stays
    there, and a step sends nothing. Plain and replicated parameters are iterated on by all ranks.

    Args:
        params: parameters or groups of them, with names or without (``named_parameters()``: errors
            then name them). As in torch's, give hidden layers' matrices only: embeddings, output
            layers, norms and biases go into a group with ``use_muon=False``, which takes AdamW's
            options. Parameters of 3 dims are stacks of matrices, one for each expert.
        lr: of all groups that say no other; it may be a tensor of one element.
        weight_decay: decoupled, of all groups that say no other.
        momentum: of the running mean of gradients.
        nesterov: whether the present gradient counts twice.
        ns_coefficients: of the polynomial.
        eps: the least norm that is divided by. AdamW's is its own.
        ns_steps: how often the polynomial is applied.
        adjust_lr_fn: None, "original" or "match_rms_adamw".
        split: which rows of a parameter are matrices by themselves, as heads and fused projections
            are: how many, or the rows of each, or a function of the parameter that says it.
        bucket_mb: of the matrices that travel at the same time, in bfloat16.

    Raises:
        ValueError: options out of range; a parameter that is no matrix, naming it; `split` that
            does not fit.
    """

    who = "Muon"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: Split | SplitFunction = None,
        bucket_mb: float = 25.0,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        super().__init__(params, defaults, split, bucket_mb)

    def _check_options(self, group: Group) -> None:
        check_options(group)

    def _planner(self) -> Planner:
        return Planner(self._matrices_of, work_of, "of a step")

    def _matrices_of(self, param: torch.Tensor) -> list[Matrix]:
        return matrices_of(param, self._rows[param], self._names[param], self.who)

    def _step_matrices(self, work: Work) -> None:
        parts = {
            number: self._local(param, group)
            for number, (param, group) in enumerate(self._matrix_params())
            if param.grad is not None
        }
        for own in parts.values():  # one by one: the bits of lists of bfloat16 differ
            group = own.group
            own.momentum.lerp_(own.grad, 1 - group["momentum"])
            own.param.mul_(1 - float(group["lr"]) * group["weight_decay"])

        def direction(job: Job) -> torch.Tensor:
            own, part = parts[work.param_of(job)], job.matrix.part
            grad, momentum = own.grad[part], own.momentum[part]
            if own.group["nesterov"]:
                momentum = grad.lerp(momentum, own.group["momentum"])
            return momentum.bfloat16()

        def iterate(job: Job, matrix: torch.Tensor) -> torch.Tensor:
            group = parts[work.param_of(job)].group
            return newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def apply(job: Job, update: torch.Tensor) -> None:
            own = parts[work.param_of(job)]
            lr = adjusted_lr(float(own.group["lr"]), own.group["adjust_lr_fn"], job.matrix.shape)
            subtract_(own.param[job.matrix.part], update, lr)

        room = self._bucket_bytes // torch.bfloat16.itemsize
        visit_owners(work.jobs, direction, iterate, apply, room)

    def _local(self, param: torch.Tensor, group: Group) -> _Local:
        grad, state = self._grad_of(param), self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum = local_of(state["momentum_buffer"])
        return _Local(local_of(param).view(-1), grad, momentum.view(-1), group)
