"""Muon on sharded parameters: each matrix is orthogonalized by one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from fsdp.optim.muon.jobs import Job
from fsdp.optim.muon.matrices import Split, SplitFunction, rows_of
from fsdp.optim.muon.newton_schulz import COEFFICIENTS, Coefficients, adjusted_lr, newton_schulz
from fsdp.optim.muon.orthogonalize import orthogonalize
from fsdp.optim.muon.settings import adamw_options, check_options, check_state
from fsdp.optim.muon.work import Work, plan_work
from fsdp.optim.tensors import local_of, name_of

__all__ = ["Muon"]

_Group = dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Local:
    """What this rank has of a parameter in a step, flat, and its group."""

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    group: _Group


class Muon(Optimizer):
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
        if bucket_mb <= 0:
            raise ValueError(f"Muon: bucket_mb={bucket_mb}; wants more than 0")
        self._bucket_bytes = int(bucket_mb * 2**20)
        self._names: dict[torch.Tensor, str] = {}
        self._rows: dict[torch.Tensor, tuple[int, ...]] = {}
        self._work: Work | None = None
        self._adamw: torch.optim.AdamW | None = None
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "use_muon": True, "split": split,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: _Group) -> None:
        """As of torch's optimizers; a group may have ``use_muon`` and ``split``.

        Raises:
            ValueError: as the optimizer itself.
        """
        if not param_group.get("use_muon", True):
            param_group = adamw_options(self.defaults) | param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._take(group, len(self.param_groups) - 1)
        except ValueError:
            self.param_groups.pop()
            raise

    def _take(self, group: _Group, index: int) -> None:
        split = group.pop("split", None)  # functions do not go into checkpoints
        for i, param in enumerate(group["params"]):
            self._names[param] = name_of(group, index, i)
        if group["use_muon"]:
            check_options(group)
            for param in group["params"]:
                self._rows[param] = rows_of(split, param, self._names[param])
        else:
            for key in self.defaults.keys() - adamw_options(self.defaults).keys() - {"use_muon"}:
                group.pop(key, None)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of all parameters that have gradients.

        Args:
            closure: computes the loss again.

        Raises:
            ValueError: a gradient that lies otherwise than its parameter; or on every rank, where
                ranks have gradients of different parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_matrices()
        self._step_others()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch's optimizers.

        Raises:
            ValueError: state that lies otherwise than its parameter, naming it.
        """
        before = self.state, self.param_groups
        super().load_state_dict(state_dict)
        try:
            check_state(self.state, self._names)
        except ValueError:
            self.state, self.param_groups = before
            raise

    def owners(self) -> dict[str, int | None]:
        """The rank of the cut axis that iterates on each matrix of the last step, by name.

        None of a matrix that every rank has whole: each of them iterates on it.
        """
        return {job.matrix.name: job.owner for job in self._work.jobs} if self._work else {}

    def _step_matrices(self) -> None:
        params = [
            (param, group) for group in self.param_groups if group["use_muon"]
            for param in group["params"]
        ]  # fmt: skip
        work = plan_work([param for param, _ in params], self._names, self._rows, self._work)
        self._work = work
        work.check_ranks()
        parts = [self._local(param, group) for param, group in params if param.grad is not None]
        for own in parts:  # one by one, as the bits of lists of bfloat16 differ (_foreach_mul_)
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
            own.param[job.matrix.part].add_(update, alpha=-lr)

        orthogonalize(work.jobs, direction, iterate, apply, self._bucket_bytes)

    def _local(self, param: torch.Tensor, group: _Group) -> _Local:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if grad.is_sparse or getattr(grad, "placements", ()) != getattr(param, "placements", ()):
            raise ValueError(
                f"Muon: the gradient of parameter {self._names[param]!r} is {grad.layout}, placed "
                f"as {getattr(grad, 'placements', 'a plain tensor')}; wants it as the parameter is"
            )
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return _Local(
            local_of(param).view(-1),
            local_of(grad).reshape(-1),
            local_of(state["momentum_buffer"]).view(-1),
            group,
        )

    def _step_others(self) -> None:
        groups = [group for group in self.param_groups if not group["use_muon"]]
        if groups:
            if self._adamw is None:
                self._adamw = torch.optim.AdamW(groups)
            self._adamw.param_groups, self._adamw.state = groups, self.state
            self._adamw.step()
