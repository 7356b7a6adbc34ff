"""A net whose parameters end within quantization blocks, and its training by 8-bit optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

__all__ = ["SIZE", "losses", "model_of", "optimizer_of", "step"]

SIZE = 64  # of blocks: small, so that small tensors have many


def model_of() -> nn.Sequential:
    """Makes a net whose second weight ends within a block; norms and biases are not quantized."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 96), nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 31)), nn.Linear(31, 24)
    )


def optimizer_of(kind: Callable[..., Any], model: nn.Module, **options: Any) -> Any:
    """Makes an 8-bit optimizer of the model's named parameters."""
    options = {"lr": 1e-2, "weight_decay": 0.1, "block_size": SIZE, "min_8bit_size": 128} | options
    return kind(model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, number: int) -> float:
    """Makes one training step and returns its loss; all ranks have the same batch."""
    torch.default_generator.manual_seed(100 + number)  # fast, and batches are of the host
    x = torch.randn(8, 24)
    loss = (model(x) - x.flip(1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    value: float = loss.item()
    return value


def losses(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """Returns the losses of several steps."""
    return [step(model, optimizer, number) for number in steps]
