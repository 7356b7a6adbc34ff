"""The optimizers that a run can name; those of fsdp are imported where they are used."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

ADAMW = "adamw"
ADAM_8BIT = "adam8bit"
MUON = "muon"

_BETAS = (0.9, 0.95)
_LAYERS = (".layers.", ".blocks.")  # in names of parameters: of decoders, of a DiT


def build_optimizer(
    name: str, model: nn.Module, *, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return an optimizer of a model's parameters, by default that which every system shares.

    Args:
        name: ``adamw``, torch's, fused; ``adam8bit``, fsdp's, the same with 8-bit moments;
            ``muon``, fsdp's, for the matrices of the layers, with AdamW for the others.
        model: as its system wraps it.
        learning_rate: of all; Muon's updates are scaled to the size of AdamW's.
        weight_decay: of all, decoupled.
    """
    if name == ADAM_8BIT:
        from fsdp.optim import Adam8bit

        return Adam8bit(
            model.named_parameters(), lr=learning_rate, betas=_BETAS, weight_decay=weight_decay
        )
    if name == MUON:
        from fsdp.optim import Muon

        return Muon(
            _muon_groups(model),
            lr=learning_rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    assert name == ADAMW
    return torch.optim.AdamW(
        _adamw_groups(model), lr=learning_rate, betas=_BETAS, weight_decay=weight_decay, fused=True
    )


def _adamw_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Plain tensors and DTensors apart: a fused step takes lists of one kind only."""
    parameters = list(model.parameters())
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    return [{"params": group} for group in (plain, sharded) if group]


def _muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The matrices of the layers; then embeddings, output layer and norms."""
    hidden: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        of_layer = any(each in name for each in _LAYERS) and parameter.ndim == 2
        (hidden if of_layer else others).append((name, parameter))
    return [{"params": hidden}, {"params": others, "use_muon": False, "betas": _BETAS}]
