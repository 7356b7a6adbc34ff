"""The published models that are simulated, as transformers' classes on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ragged_shard.planner.models.presets import PRESETS

__all__ = ["SHAPES", "Depth", "Shape", "shape_named"]


@dataclass(frozen=True)
class Depth:
    """The number of layers of a model with dense MLPs, and with experts."""

    dense: int
    experts: int

    @property
    def layers(self) -> int:
        """Number of all layers."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Shape:
    """A published model.

    Attributes:
        name: name of the planner's preset, which has the sizes of the published configuration.
        config: name of transformers' configuration class.
        model: name of transformers' model class.
        depth: number of layers of the published model.
        zoo: name of its plan in `plan_api.zoo`; None if there is none.
        extra: values of the configuration that do not determine parameters and are not in the
            preset.
    """

    name: str
    config: str
    model: str
    depth: Depth
    zoo: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters of the published model."""
        return PRESETS[self.name].parameters

    def values(self, depth: Depth, width: float = 1.0) -> dict[str, Any]:
        """Returns the values of the configuration with another depth and width.

        Args:
            depth: number of layers of each kind.
            width: factor of the inner sizes of the MLPs, which are rounded to multiples of 64.
        """
        values = dict(PRESETS[self.name].values) | self.extra
        values.pop("model_type")
        values["num_hidden_layers"] = depth.layers
        if self.depth.dense and self.depth.experts:
            values["first_k_dense_replace"] = depth.dense
        for inner in ("intermediate_size", "moe_intermediate_size"):
            if inner in values and width != 1.0:
                values[inner] = round(values[inner] * width / 64) * 64
        return values

    def build(self, depth: Depth, width: float = 1.0) -> nn.Module:
        """Returns the model on meta; experts compute only the tokens that are routed to them."""
        import transformers

        config = getattr(transformers, self.config)(use_cache=False, **self.values(depth, width))
        make: Callable[[Any], nn.Module] = getattr(transformers, self.model)
        with torch.device("meta"):
            model = make(config)
        if self.depth.experts:
            # Other implementations find the selected experts, and so need data.
            model.config._experts_implementation = "grouped_mm"  # type: ignore[union-attr]
        return model


SHAPES = (
    Shape("llama3-70b", "LlamaConfig", "LlamaForCausalLM", Depth(80, 0), "llama"),
    Shape(
        "mixtral-8x7b", "MixtralConfig", "MixtralForCausalLM", Depth(0, 32), "mixtral",
        {"num_experts_per_tok": 2},
    ),
    Shape(
        "gpt-oss-120b", "GptOssConfig", "GptOssForCausalLM", Depth(0, 36),
        extra={"num_experts_per_tok": 4, "sliding_window": 128},
    ),
    Shape(
        "deepseek-v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", Depth(3, 58),
        extra={"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_key_value_heads": 128},
    ),
)  # fmt: skip


def shape_named(name: str) -> Shape:
    """Returns the shape with this name.

    Raises:
        ValueError: there is none.
    """
    for shape in SHAPES:
        if shape.name == name:
            return shape
    names = ", ".join(one.name for one in SHAPES)
    raise ValueError(f"--models: expected some of {names}, got {name!r}; give another")
