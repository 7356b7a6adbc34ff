"""Cross entropy of DTensors that is the one device's, with classes and batch cut as they are.

Torch's own rules gather logits whose classes are sharded, and take the mean over a sharded batch as
the mean of the ranks' means, which is another number where ranks ignore different numbers of
targets. Its `loss_parallel` context gathers nothing, but refuses means on meshes of several axes,
and has to be open around backward too. Here each of the four operators is right by itself, so there
is nothing to open: logits stay sharded if the plan leaves them so.

Numbers per row, not logits, are sent: for a log-softmax the maximum and the sum of exponentials, in
backward the sum of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api import mean_losses

__all__ = ["register_losses"]

_NONE, _MEAN = 0, 1  # of at::Reduction


def register_losses() -> None:
    """Puts the operators into DTensor's table of handlers; a second call changes nothing."""
    aten, table = torch.ops.aten, DTensor._op_dispatcher._custom_op_handlers
    handlers: dict[Any, Callable[..., Any]] = {
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_forward.default: _nll_loss,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    for operator, handler in (handlers | mean_losses.handlers()).items():
        if table.get(operator) is not handler:
            table[operator] = handler


@dataclass(frozen=True)
class _Cut:
    """How logits are cut: along their classes on one axis at most, as they like along the rest.

    Attributes:
        mesh: theirs.
        placements: of the logits.
        dim: of the classes.
        axis: that cuts the classes; None if none does.
        first: of the classes that this rank holds.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dim: int
    axis: int | None
    first: int

    def over_classes(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """All ranks' numbers put together, if each has seen a part of the classes."""
        if self.axis is None:
            return tensor
        reduced: torch.Tensor = funcol.all_reduce(tensor, reduction, (self.mesh, self.axis))
        return reduced

    def over_batch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks that hold different rows."""
        for axis, placement in enumerate(self.placements):
            if axis != self.axis and not placement.is_replicate():
                tensor = funcol.all_reduce(tensor, "sum", (self.mesh, axis))
        return tensor

    @property
    def rows(self) -> tuple[Placement, ...]:
        """The placements of what has one number per row."""
        return tuple(
            Replicate() if axis == self.axis else _without(placement, self.dim)
            for axis, placement in enumerate(self.placements)
        )

    @property
    def total(self) -> tuple[Placement, ...]:
        """The placements of a sum over this rank's rows."""
        return tuple(Replicate() if one.is_replicate() else Partial() for one in self.rows)

    def wrap(
        self, local: torch.Tensor, placements: tuple[Placement, ...], like: torch.Size
    ) -> DTensor:
        """A local tensor as a DTensor of a global shape."""
        stride = torch.empty(like, device="meta").stride()
        local = local.contiguous()
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=like, stride=stride
        )


def _log_softmax(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    logits, dim, to_float = args
    logits, cut = _settled(logits, dim % logits.ndim)
    local = logits._local_tensor
    if cut.axis is None:
        return cut.wrap(torch._log_softmax(local, cut.dim, to_float), cut.placements, logits.shape)
    computed = local.float() if local.dtype in (torch.half, torch.bfloat16) else local
    none = not local.shape[cut.dim]
    shape = [1 if dim == cut.dim else size for dim, size in enumerate(local.shape)]
    lowest = computed.new_full(shape, -torch.inf)
    peak = cut.over_classes(lowest if none else computed.amax(cut.dim, keepdim=True), "max")
    shifted = computed - peak
    result = shifted - cut.over_classes(shifted.exp().sum(cut.dim, keepdim=True), "sum").log()
    return cut.wrap(result if to_float else result.to(local.dtype), cut.placements, logits.shape)


def _log_softmax_backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, output, dim, dtype = args
    output, cut = _settled(output, dim % output.ndim)
    local = _placed(grad, cut, cut.placements)
    row = cut.over_classes(local.sum(cut.dim, keepdim=True), "sum")
    result = local - output._local_tensor.exp() * row
    return cut.wrap(result.to(dtype), cut.placements, output.shape)


@dataclass(frozen=True)
class _Targets:
    """Of the targets of this rank's rows, which are among its classes, and at what index."""

    here: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, logits: DTensor, cut: _Cut, target: Any, weight: Any, ignored: int) -> _Targets:
        classes = _placed(target, cut, cut.rows)
        counted = classes != ignored
        last = cut.first + logits._local_tensor.shape[cut.dim]
        here = counted & (classes >= cut.first) & (classes < last)
        weights = counted.to(logits.dtype)
        if weight is not None:
            whole = _placed(weight, cut, (Replicate(),) * cut.mesh.ndim)
            weights = weights * whole[torch.where(counted, classes, 0)]
        index = torch.where(here, classes - cut.first, 0)
        return cls(here, index.unsqueeze(cut.dim), weights)


def _nll_loss(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    logits, target, weight, reduction, ignored = args
    logits, cut = _settled(logits, min(1, logits.ndim - 1))
    local, targets = logits._local_tensor, _Targets.of(logits, cut, target, weight, ignored)
    losses = torch.zeros_like(targets.weights)
    if local.shape[cut.dim]:
        picked = local.gather(cut.dim, targets.index).squeeze(cut.dim)
        losses = torch.where(targets.here, -picked * targets.weights, 0)
    whole, one = (Replicate(),) * cut.mesh.ndim, torch.Size([])
    if reduction == _NONE:
        shape = torch.Size(size for dim, size in enumerate(logits.shape) if dim != cut.dim)
        by_row = cut.wrap(cut.over_classes(losses, "sum"), cut.rows, shape)
        return by_row, cut.wrap(local.new_zeros(()), whole, one)
    total = cut.over_batch(targets.weights.sum())
    loss = cut.over_classes(losses.sum(), "sum")
    if reduction == _MEAN:
        loss = loss / total
    return cut.wrap(loss, cut.total, one), cut.wrap(total, whole, one)


def _nll_loss_backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, logits, target, weight, reduction, ignored, total = args
    logits, cut = _settled(logits, min(1, logits.ndim - 1))
    whole = (Replicate(),) * cut.mesh.ndim
    targets = _Targets.of(logits, cut, target, weight, ignored)
    scale = _placed(grad, cut, cut.rows if reduction == _NONE else whole)
    if reduction == _MEAN:
        scale = scale / _placed(total, cut, whole)
    result = torch.zeros_like(logits._local_tensor)
    if result.shape[cut.dim]:
        values = torch.where(targets.here, -targets.weights * scale, 0)
        result.scatter_(cut.dim, targets.index, values.unsqueeze(cut.dim))
    return cut.wrap(result, cut.placements, logits.shape)


def _settled(logits: DTensor, dim: int) -> tuple[DTensor, _Cut]:
    """Logits, moved only where they are sums, or cut along their classes in more than one way."""
    placements: list[Placement] = []
    axis = None
    for at, placement in enumerate(logits.placements):
        known: Any = placement if type(placement) in (Shard, _StridedShard) else None
        cut = None if known is None else known.dim
        if cut == dim and type(placement) is Shard and axis is None:
            axis = at
        elif cut is None or cut == dim:
            placement = Replicate()
        placements.append(placement)
    mesh = logits.device_mesh
    if tuple(placements) != logits.placements:
        logits = logits.redistribute(placements=placements)
    if axis is None:
        return logits, _Cut(mesh, tuple(placements), dim, None, 0)
    length = logits.shape[dim]
    size = -(-length // mesh.size(axis))  # as torch.chunk cuts
    first = min(size * mesh.get_local_rank(axis), length)
    return logits, _Cut(mesh, tuple(placements), dim, axis, first)


def _placed(tensor: Any, cut: _Cut, placements: tuple[Placement, ...]) -> torch.Tensor:
    """The local part of a tensor; a plain one is taken as the same on all ranks."""
    if not isinstance(tensor, DTensor):
        whole = (Replicate(),) * cut.mesh.ndim
        tensor = DTensor.from_local(tensor, cut.mesh, whole, run_check=False)
    if tensor.placements != placements:
        tensor = tensor.redistribute(placements=placements)
    local: torch.Tensor = tensor._local_tensor
    return local


def _without(placement: Any, dim: int) -> Placement:
    """The same cut of a tensor that lacks a dim."""
    if placement.is_replicate() or placement.dim < dim:
        return placement  # type: ignore[no-any-return]
    if type(placement) is Shard:
        return Shard(placement.dim - 1)
    return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
