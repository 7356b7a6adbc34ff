"""Cross entropy on local tensors of logits whose classes and rows are cut over ranks.

Numbers per row, not logits, are sent: for a log-softmax the maximum and the sum of exponentials, in
backward the sum of gradients; for a mean, how many targets count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "Cut",
    "Targets",
    "cross_entropy",
    "log_softmax",
    "log_softmax_backward",
    "nll_loss",
    "nll_loss_backward",
]

NONE, MEAN, SUM = 0, 1, 2  # of at::Reduction


@dataclass(frozen=True)
class Cut:
    """How logits are cut: along their classes on one axis at most, as they like along the rest.

    Attributes:
        mesh: theirs.
        dim: of the classes.
        axis: that cuts the classes; None if none does.
        first: of the classes that this rank holds.
        rows: axes along which ranks hold different rows.
    """

    mesh: DeviceMesh
    dim: int
    axis: int | None
    first: int
    rows: tuple[int, ...]

    def over_classes(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """All ranks' numbers put together, if each has seen a part of the classes."""
        if self.axis is None:
            return tensor
        reduced: torch.Tensor = funcol.all_reduce(tensor, reduction, (self.mesh, self.axis))
        return reduced

    def over_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks that hold different rows."""
        for axis in self.rows:
            tensor = funcol.all_reduce(tensor, "sum", (self.mesh, axis))
        return tensor


@dataclass(frozen=True)
class Targets:
    """Of the targets of this rank's rows, which are among its classes, and at what index."""

    here: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        cut: Cut,
        classes: torch.Tensor,
        weight: torch.Tensor | None,
        ignored: int,
    ) -> Targets:
        """Of local logits, the targets of their rows, and the weights of all classes."""
        counted = classes != ignored
        last = cut.first + logits.shape[cut.dim]
        here = counted & (classes >= cut.first) & (classes < last)
        weights = counted.to(logits.dtype)
        if weight is not None:
            weights = weights * weight[torch.where(counted, classes, 0)]
        index = torch.where(here, classes - cut.first, 0)
        return cls(here, index.unsqueeze(cut.dim), weights)


def log_softmax(local: torch.Tensor, cut: Cut, to_float: bool) -> torch.Tensor:
    """Of local logits, as `aten::_log_softmax`."""
    if cut.axis is None:
        return torch._log_softmax(local, cut.dim, to_float)
    computed = local.float() if local.dtype in (torch.half, torch.bfloat16) else local
    none = not local.shape[cut.dim]
    shape = [1 if dim == cut.dim else size for dim, size in enumerate(local.shape)]
    lowest = computed.new_full(shape, -torch.inf)
    peak = cut.over_classes(lowest if none else computed.amax(cut.dim, keepdim=True), "max")
    shifted = computed - peak
    result = shifted - cut.over_classes(shifted.exp().sum(cut.dim, keepdim=True), "sum").log()
    return result if to_float else result.to(local.dtype)


def log_softmax_backward(
    grad: torch.Tensor, output: torch.Tensor, cut: Cut, dtype: torch.dtype
) -> torch.Tensor:
    """The gradient of local logits, from that of their log-softmax."""
    if cut.axis is None:
        return torch._log_softmax_backward_data(grad, output, cut.dim, dtype)
    row = cut.over_classes(grad.sum(cut.dim, keepdim=True), "sum")
    return (grad - output.exp() * row).to(dtype)


def nll_loss(
    local: torch.Tensor, targets: Targets, cut: Cut, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative log likelihood of local log probabilities, and the weight of all rows.

    Returns:
        with ``NONE``, each row's; otherwise this rank's term of a sum over the ranks of `Cut.rows`.
    """
    losses = torch.zeros_like(targets.weights)
    if local.shape[cut.dim]:
        picked = local.gather(cut.dim, targets.index).squeeze(cut.dim)
        losses = torch.where(targets.here, -picked * targets.weights, 0)
    if reduction == NONE:
        return cut.over_classes(losses, "sum"), local.new_zeros(())
    total = cut.over_batch(targets.weights.sum())
    loss = cut.over_classes(losses.sum(), "sum")
    return (loss / total if reduction == MEAN else loss), total


def nll_loss_backward(
    scale: torch.Tensor,
    local: torch.Tensor,
    targets: Targets,
    cut: Cut,
    reduction: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """The gradient of local log probabilities, from that of the loss, per row with ``NONE``."""
    if reduction == MEAN:
        scale = scale / total
    result = torch.zeros_like(local)
    if result.shape[cut.dim]:
        values = torch.where(targets.here, -targets.weights * scale, 0)
        result.scatter_(cut.dim, targets.index, values.unsqueeze(cut.dim))
    return result


def cross_entropy(
    logits: torch.Tensor,
    classes: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    cut: Cut,
) -> torch.Tensor:
    """Of local logits; differentiable. Each step is that of the four operators on DTensors.

    Args:
        logits: this rank's rows and classes.
        classes: of these rows, among all.
        weight: of all classes.
        reduction: as in at::Reduction.
        ignored: rows with this class count nothing.
        cut: how logits are cut.

    Returns:
        with ``NONE``, each row's; otherwise this rank's term of a sum over the ranks of `Cut.rows`.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, classes, weight, reduction, ignored, cut)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        logits, classes, weight, reduction, ignored, cut = given
        likely = log_softmax(logits, cut, False)
        targets = Targets.of(likely, cut, classes, weight, ignored)
        loss, total = nll_loss(likely, targets, cut, reduction)
        ctx.save_for_backward(likely, targets.here, targets.index, targets.weights, total)
        ctx.cut, ctx.reduction, ctx.dtype = cut, reduction, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        likely, here, index, weights, total = ctx.saved_tensors
        targets = Targets(here, index, weights)
        grad = nll_loss_backward(grads[0], likely, targets, ctx.cut, ctx.reduction, total)
        return log_softmax_backward(grad, likely, ctx.cut, ctx.dtype), None, None, None, None, None
