"""Losses of the small models on random batches, and a training script for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from testkit.models.factories import VOCABULARY

__all__ = ["Training", "image_loss", "token_loss", "train"]


def token_loss(model: Any) -> torch.Tensor:
    """The loss of a batch of 4 random sequences of 8 tokens, the last one padded."""
    ids = torch.randint(0, VOCABULARY, (4, 8))
    labels = ids.clone()
    labels[-1, 3:] = -100
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def image_loss(model: Any) -> torch.Tensor:
    """The loss of a ViT on a batch of 4 random images."""
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))
    loss: torch.Tensor = model(pixel_values=images, labels=labels).loss
    return loss


@dataclass(frozen=True)
class Training:
    """A model, its plan, and a script's loss on a batch.

    Attributes:
        make: the model, for one device.
        plan: of a mesh, by ``sp``.
        loss: draws a batch.
        within: of one device's losses.
        sp: with sequence parallelism and without, or without alone.
        axes: of the mesh.
    """

    make: Callable[[], nn.Module]
    plan: Callable[..., Any]
    loss: Callable[[Any], torch.Tensor] = token_loss
    within: float = 1e-5
    sp: tuple[bool, ...] = (False, True)
    axes: tuple[str, str] = ("dp", "tp")


def train(
    model: nn.Module,
    loss_of: Callable[[Any], torch.Tensor] = token_loss,
    *,
    steps: int = 4,
    lr: float = 1e-3,
) -> list[float]:
    """A training script for one device; batches and dropout draw from the one generator.

    Args:
        model: any.
        loss_of: draws a batch and gives the model's loss on it.
        steps: of AdamW.
        lr: its learning rate.

    Returns:
        the loss of each step.
    """
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
