"""A stack of residual blocks, sharded by any package's `fully_shard`, and its training script.

For comparing such packages: the same script and the same batches give the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["ResidualBlock", "batch", "losses", "shard", "stack"]

WIDTH = 8


class ResidualBlock(nn.Module):
    """A residual block of 8 features: LayerNorm, two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (..., 8) to (..., 8)."""
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def stack(count: int = 3) -> nn.Sequential:
    """Makes residual blocks and a Linear of 8 to 4 features, always with the same parameters."""
    torch.manual_seed(5)
    return nn.Sequential(*[ResidualBlock() for _ in range(count)], nn.Linear(WIDTH, 4))


def shard(package: Any, model: nn.Sequential, **options: Any) -> Any:
    """Calls a package's `fully_shard` on each block, and on the model.

    Args:
        package: a module or class that has it.
        model: a `stack`.
        options: of every call.
    """
    for block in list(model)[:-1]:
        package.fully_shard(block, **options)
    return package.fully_shard(model, **options)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """Returns the batch of a step on a rank, by default this one: (3, 8)."""
    # Not torch.manual_seed, which notes a traceback for each device that is not initialized.
    torch.default_generator.manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(3, WIDTH)


def losses(
    model: nn.Module,
    *,
    steps: int = 4,
    micro: int = 1,
    prepare: Callable[[Any, bool], None] = lambda model, last: None,
    clip: float | None = None,
    device: str = "cpu",
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> torch.Tensor:
    """Trains with SGD, whose steps a scaled gradient scales, and returns the losses.

    Args:
        model: of 8 features.
        steps: of the optimizer.
        micro: backwards before each.
        prepare: called before each forward with the model, and whether it is a step's last.
        clip: the largest norm of all gradients; None: they are not clipped.
        device: of the batches, which the host draws.
        make_optimizer: of a model; by default SGD with momentum and torch's other defaults, which
            depend on the device.

    Returns:
        fp32, 1-D: the loss of each backward, and behind those of a step its norm where it is
        clipped.
    """
    optimizer, found = (make_optimizer or _sgd)(model), []
    # Before the first step: a copy in between would wait for the device, and hide a missing wait.
    batches = [batch(number).to(device) for number in range(micro * steps)]
    for step in range(steps):
        for number in range(micro):
            prepare(model, number == micro - 1)
            loss = model(batches[micro * step + number]).square().mean()
            loss.backward()
            found.append(loss.detach())
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            found.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([one.float() for one in found])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
