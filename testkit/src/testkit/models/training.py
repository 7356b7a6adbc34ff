"""Losses of the small models on random batches, and a training script for one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from testkit.models.factories import VOCABULARY

__all__ = ["Training", "image_loss", "noise_loss", "token_loss", "train", "with_noise_loss"]


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


def noise_loss(model: Any) -> torch.Tensor:
    """The loss of a DiT on a batch of 4 random images and their noise."""
    images, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    loss: torch.Tensor = model(
        images, torch.randint(0, 1000, (4,)), torch.randint(0, 10, (4,)), noise
    )
    return loss


def with_noise_loss(plan: Any, *dp: str) -> Any:
    """A plan of a DiT, made one of `dit`, which has its loss beside it.

    Args:
        plan: of plan-api.
        dp: axes along which batches are cut; none: all ranks have the whole batch.
    """
    plan = plan.under("model")
    if not dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Replicate(), plan.axes[0])
    for axis in dp:
        plan.redistribute("criterion.<in:target>", Replicate(), Shard(0), axis)
        plan.annotate("criterion.<op:mse_loss>", Shard(0), axis)
        plan.redistribute("<out>", Partial(), Replicate(), axis)
    return plan


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
    steps: int = 20,
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
