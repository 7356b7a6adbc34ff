"""The models that a run can name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from integration.errors import UsageError
from integration.models.decoders import (
    BYTE_VOCABULARY,
    DECODERS,
    DecoderShape,
    LlamaShape,
    MixtralShape,
)
from integration.models.dit import DITS, DiTShape
from integration.models.shape import ModelShape, loss_of

_SHAPES: dict[str, ModelShape] = {**DECODERS, **DITS}
MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)

__all__ = [
    "BYTE_VOCABULARY",
    "MODEL_NAMES",
    "DecoderShape",
    "DiTShape",
    "LlamaShape",
    "MixtralShape",
    "ModelShape",
    "build_model",
    "build_model_on_meta",
    "draw_weights",
    "loss_of",
    "model_shape",
    "shape_from",
]


def model_shape(name: str) -> ModelShape:
    """Return the shape of the model called ``name``.

    Raises:
        UsageError: no model has that name.
    """
    if name not in _SHAPES:
        raise UsageError(f"unknown model {name!r}; choose one of: {', '.join(MODEL_NAMES)}")
    return _SHAPES[name]


def shape_from(values: Mapping[str, Any]) -> ModelShape:
    """Return the shape whose fields, as ``asdict`` gives them, are these.

    Raises:
        UsageError: no model has such fields.
    """
    for shape in {type(shape): None for shape in _SHAPES.values()}:
        if {field.name for field in fields(shape)} == values.keys():
            return shape(**values)
    raise UsageError(f"no model is described by {', '.join(values)}; use the version that wrote it")


def build_model(shape: ModelShape, *, seed: int, dropout: float = 0.0) -> nn.Module:
    """Build a model on the CPU, in fp32, with weights drawn from ``seed``.

    Every rank that calls this with one seed holds the same weights, so that the systems
    differ in nothing but how they run.
    """
    torch.manual_seed(seed)
    return shape.build(dropout=dropout)


def build_model_on_meta(shape: ModelShape, *, dropout: float = 0.0) -> nn.Module:
    """Build a model without storage, to be sharded before ``draw_weights``."""
    with torch.device("meta"):
        return shape.build(dropout=dropout)


def draw_weights(model: nn.Module, *, seed: int) -> None:
    """Give a model from ``build_model_on_meta`` its storage, and weights drawn from ``seed``.

    The model's own initialiser runs on its parameters as they are, DTensors included; its shape's
    ``redraws`` says whether it can.
    """
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()  # type: ignore[operator]  # Hugging Face's
