"""Cross entropy of DTensors that is the one device's, with classes and batch cut as they are.

Torch's own rules gather logits whose classes are sharded, and take the mean over a sharded batch as
the mean of the ranks' means, which is another number where ranks ignore different numbers of
targets. Its `loss_parallel` context gathers nothing, but refuses means on meshes of several axes,
and has to be open around backward too. Here each of the four operators is right by itself, so there
is nothing to open: logits stay sharded if the plan leaves them so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from plan_api.ops import mean_losses
from plan_api.ops.cross_entropy import (
    NONE,
    Cut,
    Targets,
    log_softmax,
    log_softmax_backward,
    nll_loss,
    nll_loss_backward,
)

__all__ = ["loss_handlers"]


def loss_handlers() -> dict[Any, Callable[..., Any]]:
    """The handler of each operator, for DTensor's table of handlers."""
    aten = torch.ops.aten
    handlers: dict[Any, Callable[..., Any]] = {
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_forward.default: _nll_loss,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    return handlers | mean_losses.handlers()


@dataclass(frozen=True)
class _Logits:
    """Logits that have been moved only where they are sums, or their classes cut more than once.

    Attributes:
        local: this rank's.
        shape: of all.
        placements: theirs.
        cut: how that cuts classes and rows.
    """

    local: torch.Tensor
    shape: torch.Size
    placements: tuple[Placement, ...]
    cut: Cut

    @property
    def rows(self) -> tuple[Placement, ...]:
        """The placements of what has one number per row."""
        return tuple(
            Replicate() if axis == self.cut.axis else _without(placement, self.cut.dim)
            for axis, placement in enumerate(self.placements)
        )

    @property
    def total(self) -> tuple[Placement, ...]:
        """The placements of a sum over this rank's rows."""
        return tuple(Replicate() if one.is_replicate() else Partial() for one in self.rows)

    @property
    def whole(self) -> tuple[Placement, ...]:
        """The placements of what all ranks have."""
        return (Replicate(),) * len(self.placements)

    @property
    def on_one(self) -> bool:
        """Whether this rank has all of them: torch's own operator is the one device's."""
        return self.cut.axis is None and not self.cut.rows

    def part(self, tensor: Any, placements: tuple[Placement, ...]) -> torch.Tensor:
        """The local part of a tensor; a plain one is taken as the same on all ranks."""
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.cut.mesh, self.whole, run_check=False)
        if tensor.placements != placements:
            tensor = tensor.redistribute(placements=placements)
        local: torch.Tensor = tensor._local_tensor
        return local

    def targets(self, target: Any, weight: Any, ignored: int) -> Targets:
        """Of these rows."""
        return Targets.of(self.local, self.cut, *self.given(target, weight), ignored)

    def given(self, target: Any, weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The classes of these rows, and weights of classes, on this rank."""
        weights = None if weight is None else self.part(weight, self.whole)
        return self.part(target, self.rows), weights

    def wrap(
        self, local: torch.Tensor, placements: tuple[Placement, ...], shape: torch.Size
    ) -> DTensor:
        """A local tensor as a DTensor of a global shape."""
        stride = torch.empty(shape, device="meta").stride()
        local = local.contiguous()
        return DTensor.from_local(
            local, self.cut.mesh, placements, run_check=False, shape=shape, stride=stride
        )


def _log_softmax(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    dtensor, dim, to_float = args
    logits = _settled(dtensor, dim % dtensor.ndim)
    result = log_softmax(logits.local, logits.cut, to_float)
    return logits.wrap(result, logits.placements, logits.shape)


def _log_softmax_backward(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, dtensor, dim, dtype = args
    output = _settled(dtensor, dim % dtensor.ndim)
    local = output.part(grad, output.placements)
    result = log_softmax_backward(local, output.local, output.cut, dtype)
    return output.wrap(result, output.placements, output.shape)


def _nll_loss(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, DTensor]:
    dtensor, target, weight, reduction, ignored = args
    logits, one = _settled(dtensor, min(1, dtensor.ndim - 1)), torch.Size([])
    if logits.on_one:
        given = logits.given(target, weight)
        loss, total = operator(logits.local, *given, reduction, ignored)
    else:
        targets = logits.targets(target, weight, ignored)
        loss, total = nll_loss(logits.local, targets, logits.cut, reduction)
    if reduction == NONE:
        shape = torch.Size(s for dim, s in enumerate(logits.shape) if dim != logits.cut.dim)
        return logits.wrap(loss, logits.rows, shape), logits.wrap(total, logits.whole, one)
    return logits.wrap(loss, logits.total, one), logits.wrap(total, logits.whole, one)


def _nll_loss_backward(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, dtensor, target, weight, reduction, ignored, total = args
    logits = _settled(dtensor, min(1, dtensor.ndim - 1))
    scale = logits.part(grad, logits.rows if reduction == NONE else logits.whole)
    weighed = logits.part(total, logits.whole)
    if logits.on_one:
        given = logits.given(target, weight)
        result = operator(scale, logits.local, *given, reduction, ignored, weighed)
    else:
        targets = logits.targets(target, weight, ignored)
        result = nll_loss_backward(scale, logits.local, targets, logits.cut, reduction, weighed)
    return logits.wrap(result, logits.placements, logits.shape)


def _settled(dtensor: DTensor, dim: int) -> _Logits:
    placements: list[Placement] = []
    axis = None
    for at, placement in enumerate(dtensor.placements):
        known: Any = placement if type(placement) in (Shard, _StridedShard) else None
        cut = None if known is None else known.dim
        if cut == dim and type(placement) is Shard and axis is None:
            axis = at
        elif cut is None or cut == dim:
            placement = Replicate()
        placements.append(placement)
    mesh, placed = dtensor.device_mesh, tuple(placements)
    if placed != dtensor.placements:
        dtensor = dtensor.redistribute(placements=placements)
    rows = tuple(at for at, one in enumerate(placed) if at != axis and not one.is_replicate())
    first = 0
    if axis is not None:
        length = dtensor.shape[dim]
        size = -(-length // mesh.size(axis))  # as torch.chunk cuts
        first = min(size * mesh.get_local_rank(axis), length)
    cut_so = Cut(mesh, dim, axis, first, rows)
    return _Logits(dtensor._local_tensor, dtensor.shape, placed, cut_so)


def _without(placement: Any, dim: int) -> Placement:
    """The same cut of a tensor that lacks a dim."""
    if placement.is_replicate() or placement.dim < dim:
        return placement  # type: ignore[no-any-return]
    if type(placement) is Shard:
        return Shard(placement.dim - 1)
    return _StridedShard(placement.dim - 1, split_factor=placement.split_factor)
