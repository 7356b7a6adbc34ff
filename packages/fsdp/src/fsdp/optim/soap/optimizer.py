"""SOAP on sharded parameters: each block is preconditioned by the one rank that has its state."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp.optim.keep import keep_tensors, released
from fsdp.optim.owned.jobs import Job
from fsdp.optim.owned.matrices import Matrix, Split, SplitFunction, matrices_of
from fsdp.optim.owned.optimizer import Group, MatrixOptimizer
from fsdp.optim.owned.settings import check_state
from fsdp.optim.owned.visit import visit_owners
from fsdp.optim.owned.work import Planner, Work
from fsdp.optim.soap.blocks import cut, strips_of, work_by_shape
from fsdp.optim.soap.eigenbasis import Hyperparameters, step_block
from fsdp.optim.soap.settings import check_even, check_options, check_own_state
from fsdp.optim.soap.state import block_state, new_state, state_dtype
from fsdp.optim.tensors import local_of, subtract_

__all__ = ["SOAP"]


@dataclass(frozen=True, eq=False)
class _Local:
    """What this rank has of a parameter in a step, flat; its state, group, and first strip."""

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    group: Group
    first: int
    dtype: torch.dtype  # of the state


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner, each block's on one rank, and AdamW.

    A matrix is cut into blocks of at most `block_size` rows and columns. All state of a block, its
    two preconditioners, their eigenvectors and two moments, is on one rank of the axis that cuts
    the parameter, and on no other; blocks of the same rows have the same owner. Gradients travel
    there and updates come back, in the gradient's dtype. Owners stay; they are balanced by work,
    and blocks go where most of them is. What `Whole()` has put on one rank stays there, and a step
    sends nothing. Plain and replicated parameters are computed on by all ranks.

    The first gradient of a block only gives its basis, as in the authors' code. A block whose
    gradient or preconditioner is not finite (or whose preconditioner is not positive) keeps its
    state and gets no update in that step, but weight decay; a warning on its owner names it. It is
    no error, because the other ranks would wait for one that raises.

    Axes of tensor and expert parallelism cut matrices like `block_size` does: blocks are those of
    the local part, which has to be equal on all of their ranks.

    Args:
        params: parameters or groups of them, with names or without (``named_parameters()``: errors
            then name them). Embeddings, output layers, norms and biases go into a group with
            ``use_soap=False``, which takes AdamW's options. Parameters of 3 dims are stacks of
            matrices, one for each expert.
        lr: of all groups that say no other; it may be a tensor of one element.
        betas: of the gradient's mean; of the mean of its squares and of the preconditioners.
        eps: added to the root of the second. AdamW's is its own.
        weight_decay: decoupled, of all groups that say no other.
        precondition_frequency: steps between two new bases.
        block_size: the most rows and columns of a block.
        split: which rows of a parameter are matrices by themselves, as heads and fused projections
            are: how many, or the rows of each, or a function of the parameter that says it.
        bucket_mb: of the gradients that travel at the same time.

    Raises:
        ValueError: options out of range; a parameter that is no matrix, naming it; `split` that
            does not fit.

    Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (arXiv 2409.11321);
        blocks as in Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
        Distributed Shampoo Optimizer (arXiv 2309.06497), section 3.2.
    """

    who = "SOAP"

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        *,
        block_size: int = 1024,
        split: Split | SplitFunction = None,
        bucket_mb: float = 25.0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"SOAP: block_size={block_size}; wants 1 or more")
        self._block_size, self._frequency = block_size, precondition_frequency
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
        }  # fmt: skip
        super().__init__(params, defaults, split, bucket_mb)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of torch's optimizers, but that no state is cast to its parameter's dtype.

        Raises:
            ValueError: state of other blocks or owners, naming the parameter; the optimizer stays
                as it is.
        """
        last = self.register_load_state_dict_pre_hook(keep_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _check_options(self, group: Group) -> None:
        check_options(group)

    def _planner(self) -> Planner:
        work_of = work_by_shape(self._block_size, self._frequency)
        return Planner(self._strips_of, work_of, "for good")

    def _strips_of(self, param: torch.Tensor) -> list[Matrix]:
        name = self._names[param]
        found = matrices_of(param, self._rows[param], name, self.who)
        if found:
            check_even(param, found[0].axis, name)
        return strips_of(found, self._block_size)

    def _step_matrices(self, work: Work) -> None:
        parts = self._locals(work)
        for own in parts.values():
            own.state["step"] += 1
            own.param.mul_(1 - float(own.group["lr"]) * own.group["weight_decay"])
        lost: list[str] = []

        def give(job: Job) -> torch.Tensor:
            return parts[work.param_of(job)].grad[job.matrix.part]

        def compute(job: Job, grad: torch.Tensor) -> torch.Tensor:
            own = parts[work.param_of(job)]
            return self._updates(own, job, grad.to(own.dtype), lost).to(grad.dtype)

        def apply(job: Job, update: torch.Tensor) -> None:
            own = parts[work.param_of(job)]
            subtract_(own.param[job.matrix.part], update, float(own.group["lr"]))

        widest = max((own.grad.itemsize for own in parts.values()), default=1)
        visit_owners(work.jobs, give, compute, apply, self._bucket_bytes // widest)
        for name in lost:
            warnings.warn(
                f"SOAP: the gradient of parameter {name}, or a preconditioner of it, is not finite "
                f"or not positive: this step leaves the block as it is, but for weight decay",
                stacklevel=3,
            )

    def _updates(self, own: _Local, job: Job, grads: torch.Tensor, lost: list[str]) -> torch.Tensor:
        """Those of a strip's blocks; adds the names of those that cannot be computed on."""
        columns = cut(grads.shape[1], self._block_size)
        first = (job.number - own.first) * len(columns)
        (beta1, beta2), updates = own.group["betas"], int(own.state["step"].item()) - 1
        renews = updates > 0 and updates % own.group["precondition_frequency"] == 0
        now = Hyperparameters(beta1, beta2, own.group["eps"], updates, renews)
        results = torch.zeros_like(grads)
        for number, run in enumerate(columns, first):
            block = slice(run.start, run.stop)
            # In memory of its own: MKL's products depend on where in 16 bytes a matrix begins.
            grad = grads[:, block].clone(memory_format=torch.contiguous_format)
            update = step_block(block_state(own.state, number), grad, now)
            if update is None:
                lost.append(f"{job.matrix.name!r}, columns {run.start} to {run.stop - 1}")
            else:
                results[:, block] = update
        return results

    def _locals(self, work: Work) -> dict[int, _Local]:
        strips = _by_param(work)
        found: dict[int, _Local] = {}
        for number, (param, group) in enumerate(self._matrix_params()):
            if param.grad is None or number not in strips:
                continue
            grad, state = self._grad_of(param), self.state[param]
            if not state:
                device = local_of(param).device
                state.update(new_state(param, strips[number], self._block_size, device))
            first, dtype = strips[number][0].number, state_dtype(param)
            found[number] = _Local(local_of(param).view(-1), grad, state, group, first, dtype)
        return found

    def _check_state(self) -> None:
        strips = _by_param(self._plan())
        own = {param: number for number, (param, _) in enumerate(self._matrix_params())}
        for param, state in self.state.items():
            self.state[param] = released(state, param)
        for param, state in self.state.items():
            if param in own and own[param] in strips:
                meta = torch.device("meta")
                wanted = new_state(param, strips[own[param]], self._block_size, meta)
                check_own_state(state, wanted, self._names[param])
            else:
                check_state({param: state}, self._names, self.who)


def _by_param(work: Work) -> dict[int, Sequence[Job]]:
    """The strips of each parameter that has any, by its number."""
    found: dict[int, list[Job]] = {}
    for job in work.planned:
        found.setdefault(work.param_of(job), []).append(job)
    return dict(found)
