"""Cross entropy on local tensors of logits whose classes and rows are sharded.

One number per row is communicated instead of logits: for a log-softmax the maximum and the sum of
exponentials, in backward the sum of gradients; for a mean, the number of targets that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "LogitsSharding",
    "Targets",
    "cross_entropy",
    "log_softmax",
    "log_softmax_backward",
    "nll_loss",
    "nll_loss_backward",
]

NONE, MEAN, SUM = 0, 1, 2  # of at::Reduction


@dataclass(frozen=True)
class LogitsSharding:
    """How logits are sharded: along their classes on one axis at most, and along rows on any.

    Attributes:
        mesh: of the logits.
        dim: of the classes.
        axis: that shards the classes; None if none does.
        first: the first class of this rank.
        rows: axes along which ranks have different rows.
    """

    mesh: DeviceMesh
    dim: int
    axis: int | None
    first: int
    rows: tuple[int, ...]

    def over_classes(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduces over the ranks that share the classes."""
        if self.axis is None:
            return tensor
        reduced: torch.Tensor = funcol.all_reduce(tensor, reduction, (self.mesh, self.axis))
        return reduced

    def over_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks that have different rows."""
        for axis in self.rows:
            tensor = funcol.all_reduce(tensor, "sum", (self.mesh, axis))
        return tensor


@dataclass(frozen=True)
class Targets:
    """The targets of this rank's rows.

    Attributes:
        is_local: which targets are among this rank's classes.
        index: of the targets among these classes.
        weights: of the targets; 0 for ignored ones.
    """

    is_local: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        sharding: LogitsSharding,
        classes: torch.Tensor,
        weight: torch.Tensor | None,
        ignored: int,
    ) -> Targets:
        """Makes them from local logits, the classes of their rows, and weights of all classes."""
        counted = classes != ignored
        last = sharding.first + logits.shape[sharding.dim]
        is_local = counted & (classes >= sharding.first) & (classes < last)
        weights = counted.to(logits.dtype)
        if weight is not None:
            weights = weights * weight[torch.where(counted, classes, 0)]
        index = torch.where(is_local, classes - sharding.first, 0)
        return cls(is_local, index.unsqueeze(sharding.dim), weights)


def log_softmax(local: torch.Tensor, sharding: LogitsSharding, to_float: bool) -> torch.Tensor:
    """Computes `aten::_log_softmax` of local logits."""
    if sharding.axis is None:
        return torch._log_softmax(local, sharding.dim, to_float)
    computed = local.float() if local.dtype in (torch.half, torch.bfloat16) else local
    none = not local.shape[sharding.dim]
    shape = [1 if dim == sharding.dim else size for dim, size in enumerate(local.shape)]
    lowest = computed.new_full(shape, -torch.inf)
    peak = sharding.over_classes(
        lowest if none else computed.amax(sharding.dim, keepdim=True), "max"
    )
    shifted = computed - peak
    result = (
        shifted - sharding.over_classes(shifted.exp().sum(sharding.dim, keepdim=True), "sum").log()
    )
    return result if to_float else result.to(local.dtype)


def log_softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, sharding: LogitsSharding, dtype: torch.dtype
) -> torch.Tensor:
    """Computes the gradient of local logits from that of their log-softmax."""
    if sharding.axis is None:
        return torch._log_softmax_backward_data(grad, output, sharding.dim, dtype)
    row = sharding.over_classes(grad.sum(sharding.dim, keepdim=True), "sum")
    return (grad - output.exp() * row).to(dtype)


def nll_loss(
    local: torch.Tensor, targets: Targets, sharding: LogitsSharding, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the negative log likelihood of local log probabilities, and the weight of all rows.

    Returns:
        with ``NONE``, one per row; otherwise this rank's term of a sum over the ranks along
        `LogitsSharding.rows`.
    """
    losses = torch.zeros_like(targets.weights)
    if local.shape[sharding.dim]:
        picked = local.gather(sharding.dim, targets.index).squeeze(sharding.dim)
        losses = torch.where(targets.is_local, -picked * targets.weights, 0)
    if reduction == NONE:
        return sharding.over_classes(losses, "sum"), local.new_zeros(())
    total = sharding.over_batch(targets.weights.sum())
    loss = sharding.over_classes(losses.sum(), "sum")
    return (loss / total if reduction == MEAN else loss), total


def nll_loss_backward(
    scale: torch.Tensor,
    local: torch.Tensor,
    targets: Targets,
    sharding: LogitsSharding,
    reduction: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """Computes the gradient of local log probabilities from that of the loss."""
    if reduction == MEAN:
        scale = scale / total
    result = torch.zeros_like(local)
    if result.shape[sharding.dim]:
        values = torch.where(targets.is_local, -targets.weights * scale, 0)
        result.scatter_(sharding.dim, targets.index, values.unsqueeze(sharding.dim))
    return result


def cross_entropy(
    logits: torch.Tensor,
    classes: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    sharding: LogitsSharding,
) -> torch.Tensor:
    """Computes the differentiable cross entropy of local logits, as the four DTensor operators do.

    Args:
        logits: of this rank's rows and classes.
        classes: the targets of these rows, among all classes.
        weight: of all classes.
        reduction: of at::Reduction.
        ignored: the class of rows that do not count.
        sharding: of the logits.

    Returns:
        with ``NONE``, one per row; otherwise this rank's term of a sum over the ranks along
        `LogitsSharding.rows`.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, classes, weight, reduction, ignored, sharding)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        logits, classes, weight, reduction, ignored, sharding = args
        likely = log_softmax(logits, sharding, False)
        targets = Targets.of(likely, sharding, classes, weight, ignored)
        loss, total = nll_loss(likely, targets, sharding, reduction)
        ctx.save_for_backward(likely, targets.is_local, targets.index, targets.weights, total)
        ctx.sharding, ctx.reduction, ctx.dtype = sharding, reduction, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        likely, is_local, index, weights, total = ctx.saved_tensors
        targets = Targets(is_local, index, weights)
        grad = nll_loss_backward(grads[0], likely, targets, ctx.sharding, ctx.reduction, total)
        return (
            log_softmax_backward(grad, likely, ctx.sharding, ctx.dtype),
            None,
            None,
            None,
            None,
            None,
        )
