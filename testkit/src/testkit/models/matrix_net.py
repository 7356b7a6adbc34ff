"""A net of matrices and a script that trains it, for matrix optimizers such as Muon and SOAP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "STEPS", "MatrixMlp", "MatrixNet", "TorchMuon", "full_tensor", "full_tensors", "matrices_of",
    "optimizer_of", "same_bits", "sharded", "train",
]  # fmt: skip

STEPS = 50


class MatrixNet(nn.Module):
    """Matrices of several shapes, uneven, wide and tall; an embedding, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 13), nn.LayerNorm(13)
        self.up, self.down = nn.Linear(13, 37), nn.Linear(37, 13)
        self.square, self.head = nn.Linear(13, 13, bias=False), nn.Linear(13, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the mean square of the outputs, a scalar; ids are below 11."""
        x = self.norm(self.embed(ids))
        x = x + self.down(torch.tanh(self.up(x)))
        loss: torch.Tensor = self.head(x + self.square(x)).square().mean()
        return loss


class MatrixMlp(nn.Module):
    """Matrices for tensor parallelism, `up` column-wise and `down` row-wise, and one replicated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.mix = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features (..., 6) to (..., 6)."""
        y: torch.Tensor = self.mix(x + self.down(torch.relu(self.up(x))))
        return y


def matrices_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the matrices of hidden layers, for Muon, by name."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if param.ndim == 2 and not any(part in name for part in ("embed", "head"))
    ]


def sharded(fully_shard: Callable[..., Any], granularity: Any = None, **options: Any) -> Any:
    """Makes a `MatrixNet` that is fully sharded, its matrices with a granularity."""
    choose = lambda param: granularity if param.ndim == 2 else None  # an argument
    return fully_shard(MatrixNet(), shard_placement_fn=choose, **options)


def optimizer_of(kind: Any, model: nn.Module, **options: Any) -> Any:
    """Makes fsdp's `Muon` or `SOAP` for both parameter groups of a model."""
    return kind(_groups_of(model, f"use_{kind.optimizer_name.lower()}"), **{"lr": 0.02, **options})


def _groups_of(model: nn.Module, flag: str) -> list[dict[str, Any]]:
    """Returns two parameter groups: the matrices, and the rest with a flag that is False."""
    hidden = matrices_of(model)
    names = {name for name, _ in hidden}
    rest = [(name, param) for name, param in model.named_parameters() if name not in names]
    return [{"params": hidden}, {"params": rest, flag: False, "lr": 1e-2}]


class TorchMuon:
    """torch's Muon for the matrices and AdamW for the rest, which know nothing of shards.

    Args:
        model: a `MatrixNet`, or another whose matrices are named alike.
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
        """Steps both."""
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        """Clears the gradients of both."""
        for one in self.both:
            one.zero_grad()


def train(model: nn.Module, optimizer: Any, steps: int = STEPS, first: int = 0) -> list[float]:
    """Returns the losses; all ranks have one batch, so gradients do not depend on their number."""
    losses = []
    for step in range(first, first + steps):
        torch.default_generator.manual_seed(step)  # fast, and batches are of the host
        loss = model(torch.randint(0, 11, (4, 6)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the full tensor, outside of autograd; a copy of a plain tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the full parameters of a model, by name."""
    return {name: full_tensor(param) for name, param in model.named_parameters()}


def same_bits(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """Returns the names of the tensors whose bits differ; none if all are the same."""
    return [name for name in expected if not torch.equal(actual[name], expected[name])]
