"""The models that ``--model`` names."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from integration.errors import UsageError
from integration.models.config_file import CONFIGURED, shape_of_config
from integration.models.custom import custom_shape, load_function
from integration.models.decoders import (
    DECODERS,
    DecoderShape,
    DeepseekV3Shape,
    ExpertsShape,
    LlamaShape,
    MixtralShape,
)
from integration.models.dit import DITS, DiTShape
from integration.models.routers import RouterOptions, RouterSize, routers_of
from integration.models.shape import ModelShape, loss_of

_SHAPES: dict[str, ModelShape] = {**DECODERS, **DITS}
MODEL_NAMES: tuple[str, ...] = tuple(_SHAPES)

__all__ = [
    "MODEL_NAMES",
    "DecoderShape",
    "DeepseekV3Shape",
    "DiTShape",
    "ExpertsShape",
    "LlamaShape",
    "MixtralShape",
    "ModelShape",
    "RouterOptions",
    "RouterSize",
    "build_model",
    "build_model_on_meta",
    "draw_weights",
    "load_function",
    "loss_of",
    "model_shape",
    "routers_of",
    "shape_from",
]


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a model.

    Args:
        name: a name; the path of a Hugging Face config.json; or package.module:function, which
            returns a shape.

    Raises:
        UsageError: there is none.
    """
    if name in _SHAPES:
        return _SHAPES[name]
    if ":" in name:
        return custom_shape(name)
    if name.endswith(".json"):
        return shape_of_config(Path(name))
    raise UsageError(
        f"unknown model {name!r}; choose one of: {', '.join(MODEL_NAMES)}; or give the path of a"
        " config.json, or package.module:function"
    )


def shape_from(values: Mapping[str, Any]) -> ModelShape:
    """Returns the shape with these fields, as from ``asdict``.

    Raises:
        UsageError: no shape has these fields.
    """
    kinds: list[type[ModelShape]] = [*{type(shape): None for shape in _SHAPES.values()}]
    for shape in [*kinds, *CONFIGURED.values()]:
        if {field.name for field in fields(shape)} == values.keys():
            return shape(**values)
    raise UsageError(
        f"no model here has the fields {', '.join(values)}; use the version of integration that"
        " wrote the checkpoint (models of --model package.module:function are trained only)"
    )


def build_model(shape: ModelShape, *, seed: int, dropout: float = 0.0) -> nn.Module:
    """Builds a model on the CPU, in fp32, with weights drawn from ``seed``.

    Ranks that pass the same seed get the same weights, under every system.
    """
    torch.manual_seed(seed)
    return shape.build(dropout=dropout)


def build_model_on_meta(shape: ModelShape, *, dropout: float = 0.0) -> nn.Module:
    """Builds a model without storage, to be sharded before ``draw_weights``."""
    with torch.device("meta"):
        return shape.build(dropout=dropout)


def draw_weights(model: nn.Module, *, seed: int, device: str = "cpu") -> None:
    """Allocates a model from ``build_model_on_meta`` and draws its weights on ``device``.

    The model's initialiser runs on its parameters, which may be DTensors; requires a shape with
    ``can_reinitialize``.
    """
    model.to_empty(device=device)
    torch.manual_seed(seed)
    model.init_weights()  # type: ignore[operator]  # Hugging Face's
