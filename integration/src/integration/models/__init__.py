"""The models that a run can name."""

import torch
from torch import nn

from integration.errors import UsageError
from integration.models.llama import LLAMA_SHAPES, LlamaShape

MODEL_NAMES: tuple[str, ...] = tuple(LLAMA_SHAPES)

__all__ = ["MODEL_NAMES", "LlamaShape", "build_model", "model_shape", "transformer_layers"]


def model_shape(name: str) -> LlamaShape:
    """Return the shape of the model called ``name``.

    Raises:
        UsageError: no model has that name.
    """
    if name not in LLAMA_SHAPES:
        raise UsageError(f"unknown model {name!r}; choose one of: {', '.join(MODEL_NAMES)}")
    return LLAMA_SHAPES[name]


def build_model(shape: LlamaShape, *, seed: int) -> nn.Module:
    """Build a model on the CPU, in fp32, with weights drawn from ``seed``.

    Every rank that calls this with one seed holds the same weights, so that the systems
    differ in nothing but how they run.
    """
    torch.manual_seed(seed)
    return shape.build()


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a Hugging Face decoder, in order."""
    layers = model.get_submodule("model.layers")
    return list(layers.children())
