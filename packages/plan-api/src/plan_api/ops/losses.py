"""DTensor handlers of losses, with the results and gradients of one device.

Torch's own strategies gather logits whose classes are sharded, and take the mean over a sharded
batch as the mean of the ranks' means, which differs where ranks ignore different numbers of
targets. Its `loss_parallel` context gathers nothing, but refuses means on meshes of several axes,
and has to be open around backward too. Here each of the four operators of cross entropy is correct
by itself, so there is no context: logits stay sharded if the plan leaves them so.

For losses of pairs of elements, such as `mse_loss`, torch's strategies divide by the number of
elements of a rank. The gradient of a mean over shards is then too large by the number of ranks that
share the elements, which AdamW hides and clipping does not; the mean itself is the mean of the
ranks' means, which differs where shards are uneven.

Two kinds of losses are not one operator: cross entropy with label smoothing, for which DTensor
cannot sum over sharded classes in place, and losses with weights, which divide by their sum. Their
functions are replaced (`use_local_losses`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn._reduction import get_enum, legacy_get_string

from plan_api.ops.autocast import cast_up
from plan_api.ops.cross_entropy import (
    MEAN,
    NONE,
    SUM,
    LogitsSharding,
    Targets,
    cross_entropy,
    log_softmax,
    log_softmax_backward,
    nll_loss,
    nll_loss_backward,
)
from plan_api.ops.function_calls import replace_for_dtensors

__all__ = ["loss_handlers", "use_local_losses"]

_Handler: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Placements: TypeAlias = tuple[Placement, ...]


def loss_handlers() -> dict[Any, _Handler]:
    """Returns the handler of each operator, for DTensor's table of custom handlers."""
    aten = torch.ops.aten
    handlers: dict[Any, _Handler] = {
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_forward.default: _nll_loss,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    elementwise = [
        (aten.mse_loss, aten.mse_loss_backward),
        (aten.smooth_l1_loss, aten.smooth_l1_loss_backward),
        (aten.huber_loss, aten.huber_loss_backward),
        (aten.binary_cross_entropy, aten.binary_cross_entropy_backward),
        (aten.soft_margin_loss, aten.soft_margin_loss_backward),
    ]
    handlers |= {loss.default: _elementwise_loss for loss, _ in elementwise}
    return handlers | {grad.default: _elementwise_loss_backward for _, grad in elementwise}


def _local_part(tensor: Any, placements: _Placements, mesh: DeviceMesh) -> torch.Tensor:
    """Returns the local tensor in given placements; a plain tensor is taken as replicated."""
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    local: torch.Tensor = tensor._local_tensor
    return local


def _wrap(
    local: torch.Tensor, placements: _Placements, shape: torch.Size, mesh: DeviceMesh
) -> DTensor:
    """Makes a local tensor a DTensor of a global shape."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )


@dataclass(frozen=True)
class _Logits:
    """Logits that are redistributed only where Partial, or sharded twice along their classes.

    Attributes:
        local: the local tensor.
        shape: the global shape.
        placements: of the logits.
        sharding: of their classes and rows.
    """

    local: torch.Tensor
    shape: torch.Size
    placements: _Placements
    sharding: LogitsSharding

    @property
    def row_placements(self) -> _Placements:
        """The placements of a tensor with one number per row."""
        return tuple(
            Replicate() if axis == self.sharding.axis else _without(placement, self.sharding.dim)
            for axis, placement in enumerate(self.placements)
        )

    @property
    def sum_placements(self) -> _Placements:
        """The placements of a sum over this rank's rows."""
        return tuple(
            Replicate() if row_placement.is_replicate() else Partial()
            for row_placement in self.row_placements
        )

    @property
    def replicated(self) -> _Placements:
        """The placements of a tensor that all ranks have."""
        return (Replicate(),) * len(self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether this rank has all logits, so that torch's own operator computes the loss."""
        return self.sharding.axis is None and not self.sharding.rows

    def part(self, tensor: Any, placements: _Placements) -> torch.Tensor:
        """Returns the local tensor of a tensor on the mesh of the logits."""
        return _local_part(tensor, placements, self.sharding.mesh)

    def wrap(self, local: torch.Tensor, placements: _Placements, shape: torch.Size) -> DTensor:
        """Makes a local tensor a DTensor on the mesh of the logits."""
        return _wrap(local, placements, shape, self.sharding.mesh)

    def local_targets(self, target: Any, weight: Any, ignored: int) -> Targets:
        """Returns the targets of this rank's rows."""
        return Targets.of(self.local, self.sharding, *self.parts(target, weight), ignored)

    def parts(self, target: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the classes of this rank's rows, and the weights of all classes."""
        weights = None if weight is None else self.part(weight, self.replicated)
        return self.part(target, self.row_placements), weights


def _log_softmax(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    dtensor, dim, to_float = args
    logits = _logits(dtensor, dim % dtensor.ndim)
    result = log_softmax(logits.local, logits.sharding, to_float)
    return logits.wrap(result, logits.placements, logits.shape)


def _log_softmax_backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, dtensor, dim, dtype = args
    output = _logits(dtensor, dim % dtensor.ndim)
    local = output.part(grad, output.placements)
    result = log_softmax_backward(local, output.local, output.sharding, dtype)
    return output.wrap(result, output.placements, output.shape)


def _nll_loss(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor]:
    dtensor, target, weight, reduction, ignored = args
    logits, scalar = _logits(dtensor, min(1, dtensor.ndim - 1)), torch.Size([])
    if logits.is_replicated:
        parts = logits.parts(target, weight)
        loss, total = operator(logits.local, *parts, reduction, ignored)
    elif logits.sharding.axis is None:
        parts, of_rows = logits.parts(target, weight), _of_rows(reduction)
        loss, total = operator(logits.local, *parts, of_rows, ignored)
        if reduction == MEAN:
            total = logits.sharding.over_batch(total)
            loss = loss / total
    else:
        targets = logits.local_targets(target, weight, ignored)
        loss, total = nll_loss(logits.local, targets, logits.sharding, reduction)
    total = logits.wrap(total, logits.replicated, scalar)
    if reduction == NONE:
        shape = torch.Size(s for dim, s in enumerate(logits.shape) if dim != logits.sharding.dim)
        return logits.wrap(loss, logits.row_placements, shape), total
    return logits.wrap(loss, logits.sum_placements, scalar), total


def _nll_loss_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, dtensor, target, weight, reduction, ignored, total = args
    logits = _logits(dtensor, min(1, dtensor.ndim - 1))
    scale = logits.part(grad, logits.row_placements if reduction == NONE else logits.replicated)
    total = logits.part(total, logits.replicated)
    if logits.is_replicated:
        parts = logits.parts(target, weight)
        result = operator(scale, logits.local, *parts, reduction, ignored, total)
    elif logits.sharding.axis is None:
        parts, of_rows = logits.parts(target, weight), _of_rows(reduction)
        scale = scale / total if reduction == MEAN else scale
        result = operator(scale, logits.local, *parts, of_rows, ignored, total)
    else:
        targets = logits.local_targets(target, weight, ignored)
        result = nll_loss_backward(scale, logits.local, targets, logits.sharding, reduction, total)
    return logits.wrap(result, logits.placements, logits.shape)


def _of_rows(reduction: int) -> int:
    """Returns how torch's operator reduces this rank's rows, for a reduction over all ranks."""
    return NONE if reduction == NONE else SUM


def _logits(dtensor: DTensor, dim: int) -> _Logits:
    placements: list[Placement] = []
    class_axis = None
    for axis, placement in enumerate(dtensor.placements):
        shard: Any = placement if type(placement) in (Shard, _StridedShard) else None
        sharded_dim = None if shard is None else shard.dim
        if sharded_dim == dim and type(placement) is Shard and class_axis is None:
            class_axis = axis
        elif sharded_dim is None or sharded_dim == dim:
            placement = Replicate()
        placements.append(placement)
    mesh, placed = dtensor.device_mesh, tuple(placements)
    if placed != dtensor.placements:
        dtensor = dtensor.redistribute(placements=placements)
    rows = tuple(
        axis for axis, one in enumerate(placed) if axis != class_axis and not one.is_replicate()
    )
    first = 0
    if class_axis is not None:
        length = dtensor.shape[dim]
        size = -(-length // mesh.size(class_axis))  # as torch.chunk splits
        first = min(size * mesh.get_local_rank(class_axis), length)
    sharding = LogitsSharding(mesh, dim, class_axis, first, dtensor.shape[dim], rows)
    return _Logits(dtensor._local_tensor, dtensor.shape, placed, sharding)


def _without(placement: Any, dim: int) -> Placement:
    """Returns the same shard for a tensor without a dim."""
    if placement.is_replicate() or placement.dim < dim:
        return placement  # type: ignore[no-any-return]
    if type(placement) is Shard:
        return Shard(placement.dim - 1)
    return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)


def use_local_losses() -> Callable[[], None]:
    """Replaces losses of `torch.nn.functional` where they are not one operator.

    Returns:
        the inverse.
    """
    restores = [replace_for_dtensors("cross_entropy", _smoothed_cross_entropy)]
    restores += [replace_for_dtensors(name, _weighted_mean) for name in WEIGHTED_MEANS]

    def restore() -> None:
        for one in restores:
            one()

    return restore


# They divide by the sum of the weights; `huber_loss` and binary cross entropies do not.
WEIGHTED_MEANS = ("mse_loss", "l1_loss")


def _smoothed_cross_entropy(
    _: object,
    input: DTensor,  # noqa: A002  # torch's name
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if not label_smoothing or target.is_floating_point():
        return NotImplemented
    input = cast_up(input)  # noqa: A001
    logits = _logits(input, min(1, input.ndim - 1))
    if logits.is_replicated:
        return NotImplemented
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    local = _differentiable_part(input, logits.placements, input.device_mesh)
    loss = cross_entropy(
        local, *logits.parts(target, weight), get_enum(reduction), ignore_index, logits.sharding,
        label_smoothing,
    )  # fmt: skip
    if reduction != "none":
        return logits.wrap(loss, logits.sum_placements, torch.Size([]))
    shape = torch.Size(s for dim, s in enumerate(logits.shape) if dim != logits.sharding.dim)
    return logits.wrap(loss, logits.row_placements, shape)


def _weighted_mean(native: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = inspect.signature(native).bind(*args, **kwargs).arguments
    lead, weight = arguments["input"], arguments.get("weight")
    placements: _Placements = tuple(
        Replicate() if placement.is_partial() else placement for placement in lead.placements
    )
    is_replicated = all(placement.is_replicate() for placement in placements)
    if weight is None or is_replicated or not is_mean(arguments) or weight.requires_grad:
        return NotImplemented
    mesh = lead.device_mesh
    local = _differentiable_part(lead, placements, mesh)
    target = _differentiable_part(arguments["target"], placements, mesh)
    rows = tuple(axis for axis, one in enumerate(placements) if not one.is_replicate())
    weights = _local_part(weight, placements, mesh)
    loss = weighted_mean(native, local, target, weights, mesh, rows)
    summed = tuple(Partial() if axis in rows else Replicate() for axis in range(mesh.ndim))
    return _wrap(loss, summed, torch.Size([]), mesh)


def weighted_mean(
    loss: Callable[..., torch.Tensor],
    input: torch.Tensor,  # noqa: A002  # torch's name
    target: torch.Tensor,
    weight: torch.Tensor,
    mesh: DeviceMesh,
    axes: Sequence[int],
) -> torch.Tensor:
    """Computes this rank's term of a loss that is divided by the sum of all weights.

    Args:
        loss: of `torch.nn.functional`, one of `WEIGHTED_MEANS`.
        input: local.
        target: local.
        weight: local.
        mesh: of the tensors.
        axes: that shard them.
    """
    total = weight.sum()
    for axis in axes:
        total = funcol.all_reduce(total, "sum", (mesh, axis))
    return loss(input, target, reduction="sum", weight=weight) / total


def is_mean(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of a loss, by name, ask for a mean."""
    legacy = arguments.get("size_average"), arguments.get("reduce")
    if legacy != (None, None):  # deprecated, but torch still applies them
        return legacy_get_string(*legacy, emit_warning=False) == "mean"
    return bool(arguments.get("reduction", "mean") == "mean")


def _differentiable_part(
    tensor: torch.Tensor, placements: _Placements, mesh: DeviceMesh
) -> torch.Tensor:
    """Returns the local tensor in given placements, whose gradient has them too."""
    if not isinstance(tensor, DTensor):
        return _local_part(tensor, placements, mesh)
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local(grad_placements=placements)


def _elementwise_loss(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    call = _ElementwiseLoss(op, args, kwargs)
    if call.reduction == NONE:
        return _wrap(call.run(), call.placements, call.shape, call.mesh)
    local = call.run()
    if call.reduction == MEAN:
        local = local * call.share if call.share else torch.zeros_like(local)
    summed = tuple(
        Replicate() if placement.is_replicate() else Partial() for placement in call.placements
    )
    return _wrap(local, summed, torch.Size([]), call.mesh)


def _elementwise_loss_backward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    grad, *rest = args
    call = _ElementwiseLoss(op, tuple(rest), kwargs)
    replicated = (Replicate(),) * call.mesh.ndim
    placements = call.placements if call.reduction == NONE else replicated
    scale = _local_part(grad, placements, call.mesh)
    if call.reduction == MEAN:
        scale = scale * call.share
    return _wrap(call.run(scale), call.placements, call.shape, call.mesh)


class _ElementwiseLoss:
    """A call's tensors, all in the placements of the first DTensor, without Partials.

    Attributes:
        mesh: of the tensors.
        placements: of the tensors, and of results with their shape.
        shape: of the tensors.
        reduction: of at::Reduction.
        share: this rank's share of the elements.
    """

    def __init__(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        lead = next(arg for arg in args if isinstance(arg, DTensor))
        self.mesh, self.shape = lead.device_mesh, lead.shape
        self.placements: _Placements = tuple(
            Replicate() if placement.is_partial() else placement for placement in lead.placements
        )
        self._op, self._kwargs = op, kwargs
        self._args = [
            _local_part(arg, self.placements, self.mesh) if isinstance(arg, torch.Tensor) else arg
            for arg in args
        ]
        names = [argument.name for argument in op._schema.arguments]
        at = names.index("reduction") - ("grad_output" in names)
        self.reduction = args[at] if at < len(args) else kwargs.get("reduction", MEAN)
        elements = lead.numel()
        self.share = self._args[0].numel() / elements if elements else 1.0

    def run(self, *grad: torch.Tensor) -> torch.Tensor:
        """Runs the operator on the local tensors."""
        result: torch.Tensor = self._op(*grad, *self._args, **self._kwargs)
        return result
