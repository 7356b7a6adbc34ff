"""Builds the optimizers that ``--optimizer`` names; those of fsdp are imported on use."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

ADAMW = "adamw"
ADAM_8BIT = "adam8bit"
MUON = "muon"
SOAP = "soap"

_BETAS = (0.9, 0.95)


def build_optimizer(
    name: str,
    model: nn.Module,
    *,
    layers: str,
    learning_rate: float,
    weight_decay: float,
    on_buffers: bool = False,
) -> torch.optim.Optimizer:
    """Returns an optimizer of a model's parameters.

    Args:
        name: ``adamw``, torch's fused AdamW, which every system supports, or fsdp's with its bits
            where parameters are in buffers; ``adam8bit``, fsdp's AdamW with 8-bit moments; or
            ``muon`` or ``soap``, fsdp's Muon or SOAP for the matrices of the layers, and AdamW for
            the other parameters.
        model: the model as its system has wrapped it.
        layers: path of the list of repeated layers in the model.
        learning_rate: learning rate of all parameters; Muon's updates are scaled to AdamW's.
        weight_decay: decoupled weight decay of all parameters.
        on_buffers: whether parameters are in fsdp's buffers.
    """
    if name == ADAM_8BIT:
        from fsdp.optim import Adam8bit

        return Adam8bit(
            model.named_parameters(), lr=learning_rate, betas=_BETAS, weight_decay=weight_decay
        )
    if name == MUON:
        from fsdp.optim import Muon

        return Muon(
            _matrix_groups(model, layers, "use_muon"),
            lr=learning_rate,
            weight_decay=weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
    if name == SOAP:
        from fsdp import optim

        groups = _matrix_groups(model, layers, "use_soap")
        return optim.SOAP(groups, lr=learning_rate, weight_decay=weight_decay)
    assert name == ADAMW
    groups = _adamw_groups(model)
    options: dict[str, Any] = {"weight_decay": weight_decay, "fused": True}
    if on_buffers:
        from fsdp.optim import AdamW

        return AdamW(groups, lr=learning_rate, betas=_BETAS, **options)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=_BETAS, **options)


def _adamw_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Separates plain tensors from DTensors, which one fused step cannot take together."""
    parameters = list(model.parameters())
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    return [{"params": group} for group in (plain, sharded) if group]


def _matrix_groups(model: nn.Module, layers: str, option: str) -> list[dict[str, Any]]:
    """Separates the matrices of the layers from embeddings, output layer and norms.

    Args:
        model: the model as its system has wrapped it.
        layers: path of the list of layers, without prefixes of wrappers.
        option: of groups, which is False where AdamW updates them.
    """
    hidden: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        is_hidden_matrix = f".{layers}." in f".{name}" and parameter.ndim == 2
        (hidden if is_hidden_matrix else others).append((name, parameter))
    return [{"params": hidden}, {"params": others, option: False, "betas": _BETAS}]
