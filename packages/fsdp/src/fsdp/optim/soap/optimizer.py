"""SOAP on sharded parameters: each block is preconditioned by the rank that has its state."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from fsdp.optim.matrix.assignment import MatrixTask, OwnerPlan, OwnerPlanner
from fsdp.optim.matrix.exchange import compute_on_owners
from fsdp.optim.matrix.matrices import Matrix, check_even_shards, matrices_of
from fsdp.optim.matrix.optimizer import MatrixOptimizer, ParamGroup
from fsdp.optim.matrix.split import SplitOption
from fsdp.optim.matrix.state import state_dtype
from fsdp.optim.soap.blocks import (
    MatrixBlock,
    block_state,
    blocks_of,
    new_state,
    soap_cost,
    split_into_strips,
)
from fsdp.optim.soap.eigenbasis import Hyperparameters, step_block
from fsdp.optim.soap.validation import check_block_state, check_options
from fsdp.optim.state_dict import check_state_sharding, unwrap_tensors, wrap_tensors
from fsdp.optim.tensors import local_of, subtract_

__all__ = ["SOAP"]


@dataclass(frozen=True, eq=False)
class _SoapParam:
    """The flat local tensors of a parameter in a step, its state and its group.

    Attributes:
        first_blocks: number of the first block of each strip, by the strip's index in the plan.
        state_dtype: dtype of its state.
    """

    param: torch.Tensor
    grad: torch.Tensor
    state: dict[str, Any]
    group: ParamGroup
    first_blocks: dict[int, int]
    state_dtype: torch.dtype


class SOAP(MatrixOptimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner, and AdamW for other parameters.

    A matrix is divided into blocks of at most `block_size` rows and columns. All state of a block,
    its two preconditioners, their eigenvectors and two moments, is on one rank of the axis that
    shards the parameter, its owner; blocks of the same rows have the same owner. Gradients are sent
    to owners and updates are sent back, in the gradient's dtype. Owners do not change; they are
    chosen to balance the work over ranks and, within that, to have most of the block. A matrix that
    `Whole()` has placed on one rank is owned by that rank, and a step sends nothing. Plain and
    replicated parameters are updated by all ranks.

    The first gradient of a block only initializes its bases, as in the authors' code. If the
    gradient or a preconditioner of a block is not finite, or a preconditioner is not positive, the
    block keeps its state and its update in this step is weight decay alone; a warning on its owner
    names it. It is not an error, because the other ranks would wait for a rank that raises.

    Blocks are those of the matrix on one device. If tensor parallelism shards it, all ranks of this
    axis at the owner gather it, compute the same and have the same state; axes that shard stacks,
    as expert parallelism does, divide work and state. Shards must have the same size on all ranks
    of such axes.

    Args:
        params: parameters or groups of them, with names or without; with ``named_parameters()``
            errors have the names. Embeddings, output layers, norms and biases go into a group with
            ``use_soap=False``, which takes the options of AdamW. A parameter of 3 dims is a stack
            of matrices, such as one for each expert.
        lr: learning rate, the default of the groups; may be a tensor of one element.
        betas: decay rates of the mean of gradients, and of the mean of their squares and the
            preconditioners.
        eps: is added to the root of the mean of squares. AdamW has its own eps.
        weight_decay: decoupled weight decay, the default of the groups.
        precondition_frequency: steps between updates of the bases.
        block_size: maximum rows and columns of a block.
        split: which rows of a parameter are separate matrices, such as heads or fused projections:
            the number of matrices, the rows of each, or a function of the parameter that returns
            one of these; or a mapping from regular expressions to these, such as
            ``{".*qkv_proj.weight": 3}``. An expression has to match the whole name of at least
            one parameter; parameters that none matches are one matrix each.
        bucket_mb: size of the gradients that are exchanged at the same time, in MiB.

    Raises:
        ValueError: an option is out of range; a parameter is not a matrix, or `split` does not fit
            it: the error names the parameter; or a pattern of `split` matches no parameter.

    Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (arXiv 2409.11321);
        blocks as in Shi et al., A Distributed Data-Parallel PyTorch Implementation of the
        Distributed Shampoo Optimizer (arXiv 2309.06497), section 3.2.
    """

    optimizer_name = "SOAP"

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
        split: SplitOption = None,
        bucket_mb: float = 25.0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"SOAP: expected block_size to be 1 or more, got {block_size}")
        self._block_size, self._frequency = block_size, precondition_frequency
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
        }  # fmt: skip
        super().__init__(params, defaults, split, bucket_mb)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch's optimizers do, but keeps the dtypes of the state.

        Raises:
            ValueError: the state has other blocks or owners; it names the parameter, and the
                optimizer is unchanged.
        """
        last = self.register_load_state_dict_pre_hook(wrap_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def _check_options(self, group: ParamGroup) -> None:
        check_options(group)

    def _planner(self) -> OwnerPlanner:
        cost_of = soap_cost(self._block_size, self._frequency)
        return OwnerPlanner(self._strips_of, cost_of, "persistent")

    def _strips_of(self, param: torch.Tensor) -> list[Matrix]:
        name = self._names[param]
        matrices = matrices_of(param, self._rows[param], name, self.optimizer_name)
        if matrices:
            inner = [n for n in range(len(matrices[0].placements)) if n != matrices[0].axis]
            check_even_shards(param, inner, name, self.optimizer_name)
        return split_into_strips(matrices, self._block_size)

    def _step_matrices(self, plan: OwnerPlan) -> None:
        params = self._soap_params(plan)
        for one in params.values():
            one.state["step"] += 1
            one.param.mul_(1 - float(one.group["lr"]) * one.group["weight_decay"])
        skipped: list[str] = []

        def local_grad(strip: MatrixTask) -> torch.Tensor:
            return params[plan.param_index(strip)].grad[strip.matrix.local_slice]

        def compute(strip: MatrixTask, grad: torch.Tensor) -> torch.Tensor:
            one = params[plan.param_index(strip)]
            return self._updates(one, strip, grad.to(one.state_dtype), skipped).to(grad.dtype)

        def apply(strip: MatrixTask, update: torch.Tensor) -> None:
            one = params[plan.param_index(strip)]
            subtract_(one.param[strip.matrix.local_slice], update, float(one.group["lr"]))

        itemsize = max((param.grad.itemsize for param in params.values()), default=1)
        compute_on_owners(plan.tasks, local_grad, compute, apply, self._bucket_bytes // itemsize)
        for name in skipped:
            warnings.warn(
                f"SOAP: the gradient or a preconditioner of parameter {name} is not finite, or a "
                f"preconditioner is not positive: this step applies only weight decay to the block",
                stacklevel=3,
            )

    def _updates(
        self, one: _SoapParam, strip: MatrixTask, grads: torch.Tensor, skipped: list[str]
    ) -> torch.Tensor:
        """Returns the updates of a strip's blocks; adds the names of skipped blocks."""
        blocks, first_block = self._blocks_of(strip), one.first_blocks[strip.index]
        (beta1, beta2), updates = one.group["betas"], int(one.state["step"].item()) - 1
        renews_basis = updates > 0 and updates % one.group["precondition_frequency"] == 0
        options = Hyperparameters(
            beta1, beta2, one.group["eps"], updates, renews_basis=renews_basis
        )  # fmt: skip
        results = torch.zeros_like(grads)
        for index, block in enumerate(blocks, first_block):
            # A copy, as the bits of MKL's products depend on a matrix's alignment to 16 bytes.
            grad = block.part_of(grads).clone(memory_format=torch.contiguous_format)
            update = step_block(block_state(one.state, index), grad, options)
            if update is None:
                skipped.append(_description(strip, block))
            else:
                block.part_of(results).copy_(update)
        return results

    def _soap_params(self, plan: OwnerPlan) -> dict[int, _SoapParam]:
        strips = plan.tasks_by_param()
        params: dict[int, _SoapParam] = {}
        for index, (param, group) in enumerate(self._matrix_params()):
            if param.grad is None or index not in strips:
                continue
            grad, state = self._local_grad(param), self.state[param]
            if not state:
                device = local_of(param).device
                state.update(new_state(param, strips[index], self._block_size, device))
            params[index] = _SoapParam(
                local_of(param).view(-1), grad, state, group, self._first_blocks(strips[index]),
                state_dtype(param),
            )  # fmt: skip
        return params

    def _first_blocks(self, strips: list[MatrixTask]) -> dict[int, int]:
        counts = accumulate((len(self._blocks_of(strip)) for strip in strips), initial=0)
        return {strip.index: first for strip, first in zip(strips, counts, strict=False)}

    def _blocks_of(self, strip: MatrixTask) -> list[MatrixBlock]:
        return blocks_of(strip.matrix.shape, self._block_size)

    def _check_state(self) -> None:
        strips = self._plan().tasks_by_param()
        indices = {param: index for index, (param, _) in enumerate(self._matrix_params())}
        for param, state in self.state.items():
            self.state[param] = unwrap_tensors(state, param)
        for param, state in self.state.items():
            if param in indices and indices[param] in strips:
                meta = torch.device("meta")
                expected = new_state(param, strips[indices[param]], self._block_size, meta)
                check_block_state(state, expected, self._names[param])
            else:
                check_state_sharding({param: state}, self._names, self.optimizer_name)


def _description(strip: MatrixTask, block: MatrixBlock) -> str:
    rows, columns = block.rows, block.columns
    part = "" if len(rows) == strip.matrix.shape[0] else f"rows {rows.start} to {rows.stop - 1}, "
    return f"{strip.matrix.name!r}, {part}columns {columns.start} to {columns.stop - 1}"
