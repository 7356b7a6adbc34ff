"""Cross entropy on local tensors of logits whose classes and rows are sharded.

One number per row is communicated instead of logits: for a log-softmax the maximum and the sum of
exponentials, in backward the sum of gradients; for a mean, the number of targets that count. Label
smoothing adds nothing to that: its term of a row is reduced with that of the target. Where only
rows are sharded, callers use torch's own operators for the sum, and `LogitsSharding.count`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "LabelSmoothing",
    "LogitsSharding",
    "Targets",
    "cross_entropy",
    "log_likelihood_loss",
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
        classes: the number of classes of all ranks.
        rows: axes along which ranks have different rows.
    """

    mesh: DeviceMesh
    dim: int
    axis: int | None
    first: int
    classes: int
    rows: tuple[int, ...]

    def over_classes(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduces over the ranks that share the classes."""
        return tensor if self.axis is None else _all_reduce(tensor, reduction, self.mesh, self.axis)

    def over_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks that have different rows."""
        for axis in self.rows:
            tensor = _all_reduce(tensor, "sum", self.mesh, axis)
        return tensor

    def count(
        self, classes: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns what a mean divides by: the targets of all ranks that count, or their weights."""
        return self.over_batch(_weights(classes != ignored, classes, weight, dtype).sum())


def _all_reduce(tensor: torch.Tensor, reduction: str, mesh: DeviceMesh, axis: int) -> torch.Tensor:
    # Waits at once: the result is used at once, and torch's tensor that waits later costs much.
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(
        ops.all_reduce(tensor.contiguous(), reduction, mesh.get_group(axis).group_name)
    )
    return reduced


def _weights(
    counted: torch.Tensor, classes: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the weights of targets, 0 for ignored ones, from those of all classes."""
    weights = counted.to(dtype)
    return weights if weight is None else weights * weight[torch.where(counted, classes, 0)]


@dataclass(frozen=True)
class Targets:
    """The targets of this rank's rows.

    Attributes:
        is_local: which targets are among this rank's classes.
        index: of the targets among these classes.
        weights: of the targets; 0 for ignored ones.
        counted: which rows are not ignored.
    """

    is_local: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    counted: torch.Tensor

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
        weights = _weights(counted, classes, weight, logits.dtype)
        index = torch.where(is_local, classes - sharding.first, 0)
        return cls(is_local, index.unsqueeze(sharding.dim), weights, counted)


@dataclass(frozen=True)
class LabelSmoothing:
    """Moves a share of each target to all classes.

    Attributes:
        share: that is moved.
        of_class: what each of this rank's classes gets of it, with the dims of the logits; one
            number if the classes have no weights.
    """

    share: float
    of_class: torch.Tensor | float

    @classmethod
    def of(
        cls, share: float, logits: torch.Tensor, sharding: LogitsSharding,
        weight: torch.Tensor | None,
    ) -> LabelSmoothing | None:  # fmt: skip
        """Makes it from local logits, and weights of all classes; None if nothing is moved."""
        if not share:
            return None
        each = share / sharding.classes
        if weight is None:
            return cls(share, each)
        local = weight.narrow(0, sharding.first, logits.shape[sharding.dim])
        shape = [-1 if dim == sharding.dim else 1 for dim in range(logits.ndim)]
        return cls(share, local.view(shape) * each)


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
    local: torch.Tensor,
    targets: Targets,
    sharding: LogitsSharding,
    reduction: int,
    smoothing: LabelSmoothing | None = None,
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
    if smoothing is not None:
        smooth = (local * smoothing.of_class).sum(sharding.dim)
        losses = torch.where(targets.counted, (1 - smoothing.share) * losses - smooth, 0)
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
    smoothing: LabelSmoothing | None = None,
) -> torch.Tensor:
    """Computes the gradient of local log probabilities from that of the loss."""
    if reduction == MEAN:
        scale = scale / total
    result = torch.zeros_like(local)
    if result.shape[sharding.dim]:
        of_target = scale if smoothing is None else scale * (1 - smoothing.share)
        values = torch.where(targets.is_local, -targets.weights * of_target, 0)
        result.scatter_(sharding.dim, targets.index, values.unsqueeze(sharding.dim))
    if smoothing is not None:
        of_row = torch.where(targets.counted, scale, 0).unsqueeze(sharding.dim)
        result -= of_row * smoothing.of_class
    return result


def cross_entropy(
    logits: torch.Tensor,
    classes: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    sharding: LogitsSharding,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes the differentiable cross entropy of local logits, as the four DTensor operators do.

    Args:
        logits: of this rank's rows and classes.
        classes: the targets of these rows, among all classes.
        weight: of all classes.
        reduction: of at::Reduction.
        ignored: the class of rows that do not count.
        sharding: of the logits.
        label_smoothing: the share of each target that all classes get.

    Returns:
        with ``NONE``, one per row; otherwise this rank's term of a sum over the ranks along
        `LogitsSharding.rows`.
    """
    smoothing = LabelSmoothing.of(label_smoothing, logits, sharding, weight)
    options = (reduction, ignored, sharding, smoothing)
    loss: torch.Tensor = _CrossEntropy.apply(logits, classes, weight, *options)  # type: ignore[no-untyped-call]
    return loss


def log_likelihood_loss(
    likely: torch.Tensor,
    classes: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
    sharding: LogitsSharding,
) -> torch.Tensor:
    """Computes the differentiable negative log likelihood of local log probabilities.

    Args:
        likely: of this rank's rows and classes.
        classes: see `cross_entropy`, as for the others.
        weight: the same.
        reduction: the same.
        ignored: the same.
        sharding: the same.

    Returns:
        as `cross_entropy`.
    """
    options = (reduction, ignored, sharding, None)
    loss: torch.Tensor = _LogLikelihoodLoss.apply(likely, classes, weight, *options)  # type: ignore[no-untyped-call]
    return loss


class _LogLikelihoodLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        likely, classes, weight, reduction, ignored, sharding, smoothing = args
        targets = Targets.of(likely, sharding, classes, weight, ignored)
        loss, total = nll_loss(likely, targets, sharding, reduction, smoothing)
        ctx.save_for_backward(
            likely, targets.is_local, targets.index, targets.weights, targets.counted, total
        )
        ctx.sharding, ctx.reduction, ctx.smoothing = sharding, reduction, smoothing
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        likely, *of_rows, total = ctx.saved_tensors
        grad = nll_loss_backward(
            grads[0], likely, Targets(*of_rows), ctx.sharding, ctx.reduction, total, ctx.smoothing
        )
        return (grad, *(None,) * 6)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, *args: Any) -> torch.Tensor:
        ctx.dtype = logits.dtype
        likely = log_softmax(logits, args[4], False)
        return _LogLikelihoodLoss.forward(ctx, likely, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad, *others = _LogLikelihoodLoss.backward(ctx, *grads)
        likely = ctx.saved_tensors[0]
        return (log_softmax_backward(grad, likely, ctx.sharding, ctx.dtype), *others)
