"""Losses of pairs of elements: their mean is the one device's, and so is its gradient.

Torch's own rules divide by the number of elements that a rank holds. The gradient of a mean over
shards is then as many times too large as ranks share the elements, which AdamW hides and clipping
does not; the mean itself is the mean of the ranks' means, another number where shards are uneven.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

__all__ = ["handlers"]

_NONE, _MEAN = 0, 1  # of at::Reduction

Handler = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], DTensor]


def handlers() -> dict[torch._ops.OpOverload, Handler]:
    """What takes the place of torch's rules, by operator, for DTensor's table of handlers."""
    aten = torch.ops.aten
    losses = [
        (aten.mse_loss, aten.mse_loss_backward),
        (aten.smooth_l1_loss, aten.smooth_l1_loss_backward),
        (aten.huber_loss, aten.huber_loss_backward),
        (aten.binary_cross_entropy, aten.binary_cross_entropy_backward),
        (aten.soft_margin_loss, aten.soft_margin_loss_backward),
    ]
    forward: dict[Any, Handler] = {loss.default: _loss for loss, _ in losses}
    return forward | {backward.default: _loss_backward for _, backward in losses}


def _loss(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = _Call(op, args, kwargs)
    if call.reduction == _NONE:
        return call.wrap(call.run(), call.placements, call.shape)
    local = call.run()
    if call.reduction == _MEAN:
        local = local * call.share if call.share else torch.zeros_like(local)
    summed = [Replicate() if one.is_replicate() else Partial() for one in call.placements]
    return call.wrap(local, tuple(summed), torch.Size([]))


def _loss_backward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    grad, *rest = args
    call = _Call(op, tuple(rest), kwargs)
    whole = (Replicate(),) * call.mesh.ndim
    scale = call.local(grad, call.placements if call.reduction == _NONE else whole)
    if call.reduction == _MEAN:
        scale = scale * call.share
    return call.wrap(call.run(scale), call.placements, call.shape)


class _Call:
    """A call's tensors, placed alike and without sums: as the first DTensor among them is.

    Attributes:
        mesh: theirs.
        placements: of all, and of what has their shape.
        shape: of all.
        reduction: of at::Reduction.
        share: of the elements, how many this rank holds.
    """

    def __init__(
        self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        lead = next(one for one in args if isinstance(one, DTensor))
        self.mesh, self.shape = lead.device_mesh, lead.shape
        self.placements: tuple[Placement, ...] = tuple(
            Replicate() if one.is_partial() else one for one in lead.placements
        )
        self._op, self._kwargs = op, kwargs
        self._args = [
            self.local(one, self.placements) if isinstance(one, torch.Tensor) else one
            for one in args
        ]
        names = [argument.name for argument in op._schema.arguments]
        at = names.index("reduction") - ("grad_output" in names)
        self.reduction = args[at] if at < len(args) else kwargs.get("reduction", _MEAN)
        elements = lead.numel()
        self.share = self._args[0].numel() / elements if elements else 1.0

    def run(self, *grad: torch.Tensor) -> torch.Tensor:
        """The operator on the local parts."""
        result: torch.Tensor = self._op(*grad, *self._args, **self._kwargs)
        return result

    def local(self, tensor: Any, placements: tuple[Placement, ...]) -> torch.Tensor:
        """The local part of a tensor; a plain one is taken as the same on all ranks."""
        if not isinstance(tensor, DTensor):
            whole = (Replicate(),) * self.mesh.ndim
            tensor = DTensor.from_local(tensor, self.mesh, whole, run_check=False)
        if tensor.placements != placements:
            tensor = tensor.redistribute(placements=placements)
        local: torch.Tensor = tensor._local_tensor
        return local

    def wrap(
        self, local: torch.Tensor, placements: tuple[Placement, ...], shape: torch.Size
    ) -> DTensor:
        """A local tensor as a DTensor of a global shape."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local.contiguous(), self.mesh, placements, run_check=False, shape=shape, stride=stride
        )
