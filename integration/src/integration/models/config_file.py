"""Models of a Hugging Face ``config.json``."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from integration.errors import UsageError
from integration.models.decoders import (
    DecoderShape,
    DeepseekV3Shape,
    Gemma3Shape,
    GptOssShape,
    LlamaShape,
    MixtralShape,
    Qwen3MoeShape,
    Qwen3Shape,
)
from integration.models.shape import ModelShape

# Entries of the file that are not options of the model here: its class, and the form of weights,
# which are fp32.
_IGNORED = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "quantization_config",
})  # fmt: skip
# What the trainer decides.
_OWN = frozenset({"use_cache", "attention_dropout", "attn_implementation"})


class _ConfiguredShape(DecoderShape):
    """Sizes of a config.json, with its other entries as JSON."""

    config: str

    @property
    def has_router_loss(self) -> bool:
        """Whether the file has ``"output_router_logits": true``."""
        return bool(json.loads(self.config).get("output_router_logits"))

    def with_vocabulary(self, size: int) -> ModelShape:
        """Returns itself, as the file has the size of the vocabulary."""
        return ModelShape.with_vocabulary(self, size)

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration, those of the file among them."""
        others = {key: value for key, value in asdict(self).items() if key != "config"}
        trainers = super().options(dropout=dropout)
        own = {key: trainers[key] for key in _OWN}
        entries: dict[str, Any] = json.loads(self.config)
        return others | entries | own


@dataclass(frozen=True)
class ConfiguredLlamaShape(_ConfiguredShape, LlamaShape):
    """Sizes of a ``LlamaForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredQwen3Shape(_ConfiguredShape, Qwen3Shape):
    """Sizes of a ``Qwen3ForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredGemma3Shape(_ConfiguredShape, Gemma3Shape):
    """Sizes of a ``Gemma3ForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredMixtralShape(_ConfiguredShape, MixtralShape):
    """Sizes of a ``MixtralForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredQwen3MoeShape(_ConfiguredShape, Qwen3MoeShape):
    """Sizes of a ``Qwen3MoeForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredGptOssShape(_ConfiguredShape, GptOssShape):
    """Sizes of a ``GptOssForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


@dataclass(frozen=True)
class ConfiguredDeepseekV3Shape(_ConfiguredShape, DeepseekV3Shape):
    """Sizes of a ``DeepseekV3ForCausalLM``; ``config`` has the other entries of its config.json."""

    config: str = "{}"


# By model_type.
CONFIGURED: dict[str, type[_ConfiguredShape]] = {
    "llama": ConfiguredLlamaShape,
    "qwen3": ConfiguredQwen3Shape,
    "gemma3_text": ConfiguredGemma3Shape,
    "mixtral": ConfiguredMixtralShape,
    "qwen3_moe": ConfiguredQwen3MoeShape,
    "gpt_oss": ConfiguredGptOssShape,
    "deepseek_v3": ConfiguredDeepseekV3Shape,
}


def shape_of_config(path: Path) -> ModelShape:
    """Returns the shape of the model of a config.json.

    Raises:
        UsageError: the file cannot be read, is of another family or has dropout, or some layers of
            its Qwen3-MoE have no experts.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        family = values["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--model {path}: expected a config.json of Hugging Face, which can be read, got an"
            f" error ({error!r}); give another file"
        ) from error
    if family not in CONFIGURED:
        raise UsageError(
            f"--model {path}: expected model_type {', '.join(CONFIGURED)}, got {family!r}; give"
            " package.module:function with a model of your own"
        )
    if values.get("attention_dropout"):
        raise UsageError(
            f"--model {path}: expected attention_dropout 0, got {values['attention_dropout']};"
            " set it to 0 there, and give --dropout"
        )
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        raise UsageError(
            f"--model {path}: expected experts in all layers, got mlp_only_layers"
            f" {values.get('mlp_only_layers', [])} and decoder_sparse_step"
            f" {values.get('decoder_sparse_step', 1)}; give package.module:function with a model of"
            " your own, and a plan of it (--plan)"
        )
    return _shape(family, values)


def _shape(family: str, values: dict[str, Any]) -> ModelShape:
    from transformers import AutoConfig

    # With the defaults of the class for what the file leaves out.
    config = AutoConfig.for_model(**values)
    kind: Any = CONFIGURED[family]
    names = [field.name for field in fields(kind) if field.name != "config"]
    sizes = {name: getattr(config, name) for name in names}
    others = {key: value for key, value in values.items() if key not in {*names, *_IGNORED, *_OWN}}
    shape: ModelShape = kind(**sizes, config=json.dumps(others, sort_keys=True))
    return shape
