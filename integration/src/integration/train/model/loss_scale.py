"""The loss scale of fp16, whose smallest gradients would otherwise be zero.

The loss is multiplied by it before backward, and gradients, in fp32, are divided by it before they
are clipped. A step whose gradients are not finite is skipped on all ranks, and the next one has a
smaller scale. `torch.amp.GradScaler` does the same for plain tensors and DTensors that are sharded
evenly; its constants are used here, on the local tensors of any placement.

Source: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_GROWTH, _BACKOFF = 2.0, 0.5
_GROWTH_INTERVAL = 2000


@dataclass(frozen=True)
class LossScale:
    """A loss scale and what it depends on.

    Attributes:
        value: the factor of the loss.
        steps: steps with finite gradients since the factor has changed.
    """

    value: float = 2.0**16
    steps: int = 0

    def after(self, *, finite: bool) -> LossScale:
        """Returns the scale of the next step.

        Args:
            finite: whether all gradients of this step were finite.
        """
        if not finite:
            return LossScale(self.value * _BACKOFF)
        if self.steps + 1 == _GROWTH_INTERVAL:
            return LossScale(self.value * _GROWTH)
        return LossScale(self.value, self.steps + 1)

    @property
    def is_too_small(self) -> bool:
        """Whether gradients of the loss itself, unscaled, were not finite."""
        return self.value < 1


def unscale_gradients(
    parameters: Iterable[nn.Parameter], scale: float, device: torch.device
) -> bool:
    """Divides gradients by a loss scale, in place; all ranks call it.

    Args:
        parameters: plain tensors and DTensors of any placements, whose gradients are in fp32.
        scale: the loss scale.
        device: of this rank.

    Returns:
        Whether all gradients of all ranks are finite.
    """
    by_device: dict[torch.device, list[Tensor]] = {}  # offloaded ones are on the host
    for param in parameters:
        if param.grad is not None and (local := _local(param.grad)).numel():
            by_device.setdefault(local.device, []).append(local)
    found = torch.zeros(1, device=device)
    with torch.no_grad():
        for each, grads in by_device.items():
            own = torch.zeros(1, device=each)
            inverse = torch.full((1,), 1 / scale, device=each)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, own, inverse)
            found += own.to(device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return not found.item()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
