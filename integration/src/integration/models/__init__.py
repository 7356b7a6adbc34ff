"""The models that a run can name."""

import torch
from torch import nn

from integration.errors import UsageError
from integration.models.llama import LLAMA_SHAPES, LlamaShape

MODEL_NAMES: tuple[str, ...] = tuple(LLAMA_SHAPES)

__all__ = [
    "MODEL_NAMES",
    "LlamaShape",
    "build_model",
    "build_model_on_meta",
    "draw_weights",
    "model_shape",
    "transformer_layers",
]


def model_shape(name: str) -> LlamaShape:
    """Return the shape of the model called ``name``.

    Raises:
        UsageError: no model has that name.
    """
    if name not in LLAMA_SHAPES:
        raise UsageError(f"unknown model {name!r}; choose one of: {', '.join(MODEL_NAMES)}")
    return LLAMA_SHAPES[name]


def build_model(shape: LlamaShape, *, seed: int, attention_dropout: float = 0.0) -> nn.Module:
    """Build a model on the CPU, in fp32, with weights drawn from ``seed``.

    Every rank that calls this with one seed holds the same weights, so that the systems
    differ in nothing but how they run.
    """
    torch.manual_seed(seed)
    return shape.build(attention_dropout=attention_dropout)


def build_model_on_meta(shape: LlamaShape, *, attention_dropout: float = 0.0) -> nn.Module:
    """Build a model without storage, to be sharded before ``draw_weights``."""
    with torch.device("meta"):
        return shape.build(attention_dropout=attention_dropout)


def draw_weights(model: nn.Module, *, seed: int) -> None:
    """Give a model from ``build_model_on_meta`` its storage, and weights drawn from ``seed``.

    The model's own initialiser runs on its parameters as they are, DTensors included.
    """
    model.to_empty(device="cpu")
    torch.manual_seed(seed)
    model.init_weights()  # type: ignore[operator]  # Hugging Face's


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a Hugging Face decoder, in order."""
    layers = model.get_submodule("model.layers")
    return list(layers.children())
