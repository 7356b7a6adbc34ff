"""A small model, each part of which one kind of entry of a plan parallelizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "HEADS", "TOKENS", "WIDTH", "PlanModel"]

BATCH, TOKENS, WIDTH = 4, 8, 8
HEADS = 2
EXPERTS = 4


class CountedMlp(nn.Module):
    """Two Linears; `calls` counts forwards of all modules of this class in the process."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, WIDTH)."""
        CountedMlp.calls += 1
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class SmallAttention(nn.Module):
    """Causal attention with one projection for queries, keys and values each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, WIDTH)."""
        q, k, v = (
            linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class LoopedExperts(nn.Module):
    """Loops over the chosen experts, as transformers' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.number = EXPERTS
        self.seen = 0  # the number of experts in the last forward
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Takes tokens (tokens, WIDTH), and experts and weights (tokens, choices)."""
        self.seen = self.number
        out = torch.zeros_like(x)
        for expert in range(self.number):
            token, slot = torch.where(chosen == expert)
            result = torch.tanh(x[token] @ self.up[expert].t()) @ self.down[expert].t()
            out = out.index_add(0, token, result * weights[token, slot, None])
        return out


class RoutedExperts(nn.Module):
    """A router, and two experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), LoopedExperts()

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, WIDTH)."""
        rows = x.flatten(0, 1)
        weights, chosen = torch.softmax(self.router(rows), -1).topk(2, -1)
        out: Tensor = x + self.experts(rows, chosen, weights).unflatten(0, x.shape[:2])
        return out


class ScaledByPosition(nn.Module):
    """Scales features by factors that its forward creates."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, WIDTH)."""
        self.factors = torch.arange(WIDTH)
        out: Tensor = x * (1 + self.factors / WIDTH).to(x.dtype)
        return out


class PlanModel(nn.Module):
    """Linears, an MLP and attention, with the experts, dropout and factory of a run's options.

    Args:
        options: options of a run, of which ``experts``, ``factory`` and ``dropout`` add modules.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first, self.mlp = nn.Linear(WIDTH, WIDTH), CountedMlp()
        self.attention = SmallAttention()
        self.routed = RoutedExperts() if "experts" in options else nn.Identity()
        self.dropout = nn.Dropout(options.get("dropout", 0.0))
        self.positions = ScaledByPosition() if "factory" in options else nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns (batch, tokens, WIDTH)."""
        x = self.mlp(self.first(x))
        x = self.dropout(self.routed(self.attention(x)))
        out: Tensor = self.last(self.positions(x))
        return out
