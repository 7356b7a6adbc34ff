"""A net of matrices, and a script that trains it: for optimizers that treat matrices as such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "STEPS", "Mlp", "Net", "TorchMuon", "matrices_of", "optimizer_of", "same_bits", "sharded",
    "train", "whole", "wholes",
]  # fmt: skip

STEPS = 50


class Net(nn.Module):
    """Matrices of several shapes, uneven, wide and tall; an embedding, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 13), nn.LayerNorm(13)
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 13)
        self.square, self.head = nn.Linear(13, 13, bias=False), nn.Linear(13, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out; ids are below 11."""
        x = self.norm(self.embed(ids))
        x = x + self.down(torch.tanh(self.up(x)))
        loss: torch.Tensor = self.head(x + self.square(x)).square().mean()
        return loss


class Mlp(nn.Module):
    """Matrices that tensor parallelism cuts, `up` by columns and `down` by rows, and one not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mix = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of 6 features."""
        y: torch.Tensor = self.mix(x + self.down(torch.relu(self.up(x))))
        return y


def matrices_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Of hidden layers: what Muon is for."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.ndim == 2 and not any(part in name for part in ("embed", "head"))
    ]


def sharded(fully_shard: Callable[..., Any], granularity: Any = None, **options: Any) -> Any:
    """A `Net` that is fully sharded, its matrices with a granularity."""
    choose = lambda param: granularity if param.ndim == 2 else None  # an argument
    return fully_shard(Net(), shard_placement_fn=choose, **options)


def optimizer_of(kind: Any, model: nn.Module, **options: Any) -> Any:
    """An optimizer of both groups of a model: of fsdp's `Muon` or `SOAP`."""
    return kind(_groups_of(model, f"use_{kind.who.lower()}"), **{"lr": 0.02, **options})


def _groups_of(model: nn.Module, flag: str) -> list[dict[str, Any]]:
    """Two parameter groups: these matrices, and with a flag that is False the rest."""
    hidden = matrices_of(model)
    names = {name for name, _ in hidden}
    rest = [(name, param) for name, param in model.named_parameters() if name not in names]
    return [{"params": hidden}, {"params": rest, flag: False, "lr": 1e-2}]


class TorchMuon:
    """Two optimizers of torch, which know nothing of shards.

    Args:
        model: a `Net`, or another whose matrices are named alike.
        options: of `torch.optim.Muon`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        muon, adamw = _groups_of(model, "use_muon")
        adamw.pop("use_muon")
        decay = options.get("weight_decay", 0.1)
        self.both: list[torch.optim.Optimizer] = [
            torch.optim.Muon(muon["params"], lr=0.02, **options),
            torch.optim.AdamW([adamw], weight_decay=decay),
        ]

    def step(self) -> None:
        """Of both."""
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        """Of both."""
        for one in self.both:
            one.zero_grad()


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, first: int = 0) -> list[float]:
    """The losses; the same batch on all ranks, so that gradients do not depend on their number."""
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 11, (4, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all its shards, outside of autograd."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model with all their shards, by name."""
    return {name: whole(param) for name, param in model.named_parameters()}


def same_bits(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """The names of tensors that are not the same: none, if all is well."""
    return [name for name in expected if not torch.equal(actual[name], expected[name])]
