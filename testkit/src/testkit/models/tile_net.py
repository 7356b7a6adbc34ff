"""A net whose weights have partial tiles at their edges, and its training with quantized weights.

The quantization here is the plain reference, and knows nothing of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

__all__ = ["EXPERTS", "WIDTH", "batch", "fake_quantized", "losses", "net", "plain_losses"]

WIDTH, EXPERTS = 20, 3
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class TileBlock(nn.Module):
    """A residual block: a norm, two Linears, and a stack of matrices as experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 36), nn.Linear(36, WIDTH)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (..., WIDTH) to (..., WIDTH)."""
        h = self.norm(x)
        each = torch.cat([h @ expert.t() for expert in self.experts.unbind()], -1)
        y: torch.Tensor = x + self.down(torch.tanh(self.up(h) + each))
        return y


def net() -> nn.Sequential:
    """Makes two blocks and a Linear of five rows, always with the same parameters."""
    torch.manual_seed(3)
    return nn.Sequential(TileBlock(), TileBlock(), nn.Linear(WIDTH, 5))


def batch(number: int) -> torch.Tensor:
    """Makes a batch (6, WIDTH), the same on all ranks: gradients do not depend on their number."""
    torch.default_generator.manual_seed(100 + number)  # fast, and batches are of the host
    return torch.randn(6, WIDTH)


def losses(
    model: Any,
    optimizer: Any,
    steps: Iterable[int],
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[bool], object] = bool,
) -> list[float]:
    """Trains and returns the loss of each backward.

    Args:
        model: a `net`.
        optimizer: of its parameters.
        steps: of the optimizer.
        micro: backwards for each step.
        dtype: of the model's inputs.
        prepare: called before each forward with whether it is a step's last.
    """
    found = []
    for step in steps:
        for number in range(micro):
            prepare(number == micro - 1)
            loss = model(batch(micro * step + number).to(dtype)).float().square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def plain_losses(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    used: Callable[[str, torch.Tensor], torch.Tensor],
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """`losses` on one device, with parameters that are transformed before each forward.

    Args:
        model: whose parameters are trained.
        optimizer: of these.
        steps: as of `losses`.
        used: takes a parameter's name and value and returns the value to compute with, whose
            gradient becomes the parameter's.
        micro: as of `losses`.
        dtype: of the computation.
    """
    found = []
    for step in steps:
        for number in range(micro):
            params = dict(model.named_parameters())
            leaves = {
                name: used(name, param.detach()).to(dtype).requires_grad_(param.requires_grad)
                for name, param in params.items()
            }
            x = batch(micro * step + number).to(dtype)
            loss = functional_call(model, leaves, x).float().square().mean()
            loss.backward()
            found.append(loss.item())
            for name, param in params.items():
                grad = leaves[name].grad
                if grad is not None:
                    grad = grad.to(param.dtype)
                    param.grad = grad if param.grad is None else param.grad + grad
        optimizer.step()
        optimizer.zero_grad()
    return found


def fake_quantized(weight: torch.Tensor, dtype: torch.dtype, rows: int, cols: int) -> torch.Tensor:
    """Quantizes and dequantizes a weight of fp32 by tiles; copies a weight of 1 dim."""
    if weight.ndim < 2:
        return weight.clone()
    found = torch.empty_like(weight)
    for matrix, out in zip(_stack(weight), _stack(found), strict=True):
        for top in range(0, matrix.shape[0], rows):
            for left in range(0, matrix.shape[1], cols):
                tile = matrix[top : top + rows, left : left + cols]
                scale = tile.abs().max() / _LARGEST[dtype]
                if scale == 0:
                    codes = torch.zeros_like(tile)
                elif dtype is torch.int8:
                    codes = torch.round(tile / scale)
                else:
                    codes = (tile / scale).to(dtype).float()
                out[top : top + rows, left : left + cols] = codes * scale
    return found


def _stack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, *tensor.shape[-2:])
