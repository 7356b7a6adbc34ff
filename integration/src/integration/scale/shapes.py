"""The public models whose shapes are simulated, as transformers' own classes, on meta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ragged_shard.planner.presets import PRESETS

__all__ = ["SHAPES", "Depth", "Shape", "shape_named"]


@dataclass(frozen=True)
class Depth:
    """How many layers a model has: those whose MLP is dense, and those with experts."""

    dense: int
    experts: int

    @property
    def layers(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Shape:
    """A public model.

    Attributes:
        name: of the planner's preset, which holds the sizes of the published configuration.
        config: name of transformers' class of its configuration.
        model: name of that of the model.
        depth: of the published model.
        zoo: name of its plan in `plan_api.zoo`; None if there is none.
        extra: what of the configuration does not decide parameters, and so is not in the preset.
    """

    name: str
    config: str
    model: str
    depth: Depth
    zoo: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Of the published model."""
        return PRESETS[self.name].parameters

    def values(self, depth: Depth, width: float = 1.0) -> dict[str, Any]:
        """The configuration with other layers.

        Args:
            depth: how many layers of each kind.
            width: by what the inner sizes of the MLPs are multiplied, to multiples of 64.
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
        """The model on meta; experts are computed for the tokens that have chosen them alone."""
        import transformers

        config = getattr(transformers, self.config)(use_cache=False, **self.values(depth, width))
        make: Callable[[Any], nn.Module] = getattr(transformers, self.model)
        with torch.device("meta"):
            model = make(config)
        if self.depth.experts:
            # The others look which experts are hit, and so need numbers.
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
    """The shape of that name.

    Raises:
        ValueError: there is none.
    """
    for shape in SHAPES:
        if shape.name == name:
            return shape
    raise ValueError(f"no model {name!r}; there are {', '.join(one.name for one in SHAPES)}")
