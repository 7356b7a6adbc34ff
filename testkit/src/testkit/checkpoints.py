"""Saves and loads a model and its optimizer, on all ranks, with `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.optimizer import Optimizer

__all__ = ["load_checkpoint", "save_checkpoint"]


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, flat: bool = False
) -> None:
    """Saves a model and its optimizer.

    Args:
        folder: where the checkpoint is written.
        model: with parameters that may be DTensors.
        optimizer: of parameters of the model.
        flat: whether the optimizer's state dict is flattened, as pipelines and torchtitan do.
    """
    dcp.save(_state(model, optimizer, flat), checkpoint_id=folder)


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: Optimizer, *, flat: bool = False
) -> None:
    """Loads what `save_checkpoint` has saved, also on another number of ranks."""
    state = _state(model, optimizer, flat)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_options(flat))


def _state(model: nn.Module, optimizer: Optimizer, flat: bool) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_options(flat)),
    }


def _options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)
