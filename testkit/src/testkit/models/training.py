"""Losses of the small models on random batches, and a training script for one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from testkit.comm_log import CommLog
from testkit.models.factories import VOCABULARY

__all__ = ["Trained", "Training", "image_loss", "token_loss", "train", "train_with_clipping"]


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


@dataclass(frozen=True)
class Trained:
    """What a training script has seen, on one rank.

    Attributes:
        losses: of each microbatch.
        norms: of the gradients of each step, before they were clipped.
        sent: of each step that was logged, how often each collective was called, by its name and
            its bytes in and out.
        params: this rank's local tensors at the end, by name.
    """

    losses: list[float]
    norms: list[float]
    sent: list[Counter[tuple[str, int, int]]]
    params: dict[str, torch.Tensor]

    def differences(self, other: Trained) -> list[str]:
        """Returns what differs in any bit, but for what was sent."""
        assert self.params.keys() == other.params.keys()
        params = [name for name, one in self.params.items() if not one.equal(other.params[name])]
        scalars = [
            name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)
        ]
        return scalars + params


def train_with_clipping(
    model: nn.Module,
    *,
    steps: int = 4,
    logged: Collection[int] = (),
    microbatches: int = 1,
    microbatch: Callable[[Any, bool], AbstractContextManager[object]] = lambda *_: nullcontext(),
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Callable[[Any], torch.Tensor] = token_loss,
) -> Trained:
    """A training script that clips gradients, and does not know how the model is parallelized.

    Args:
        model: its parameters are DTensors.
        steps: of the optimizer.
        logged: numbers of the steps whose collectives are recorded; such a step takes four times
            as long.
        microbatches: of each step.
        microbatch: returns the context of a microbatch, for the model and whether it is the last.
        optimizer: None: AdamW.
        loss_of: draws a batch and gives the model's loss on it.
    """
    torch.manual_seed(2)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, sent = [], [], []
    for step in range(steps):
        with CommLog() if step in logged else nullcontext() as log:
            for number in range(microbatches):
                with microbatch(model, number == microbatches - 1):
                    loss = loss_of(model)
                    loss.backward()
                losses.append(_scalar(loss))
            norms.append(_scalar(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        if log is not None:
            calls = ((str(call.op), call.input_bytes, call.output_bytes) for call in log.calls)
            sent.append(Counter(calls))
    local: dict[str, Any] = {name: param.detach() for name, param in model.named_parameters()}
    return Trained(losses, norms, sent, {name: one.to_local() for name, one in local.items()})


def _scalar(tensor: torch.Tensor) -> float:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).item()
