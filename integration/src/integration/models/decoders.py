"""Hugging Face's decoders, unmodified."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from integration.data.tokenizer import BYTE_VOCABULARY
from integration.models.shape import ModelShape


@dataclass(frozen=True)
class DecoderShape(ModelShape):
    """Sizes of a decoder; fields are named as in ``transformers.LlamaConfig``.

    Attributes:
        model_class: name of the model in transformers, which names its configuration.
    """

    tensor_parallel_sizes: ClassVar[tuple[str, ...]] = (
        "num_attention_heads", "num_key_value_heads", "intermediate_size",
    )  # fmt: skip
    model_class: ClassVar[str]
    limits_attention: ClassVar[bool] = True

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = BYTE_VOCABULARY
    tie_word_embeddings: bool = False

    def with_vocabulary(self, size: int) -> ModelShape:
        """Returns the shape with a vocabulary of ``size`` tokens."""
        return replace(self, vocab_size=size)

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration.

        With dropout, attention is eager, so that its mask is an ordinary tensor operation.
        """
        return asdict(self) | {
            "max_position_embeddings": 2048,
            "use_cache": False,
            "attention_dropout": dropout,
            "attn_implementation": "eager" if dropout else "sdpa",
        }

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model; ``dropout`` is of attention's weights."""
        # Imported on use, as it takes seconds and options are validated without a model.
        import transformers

        make: Any = getattr(transformers, self.model_class)
        model: nn.Module = make(make.config_class(**self.options(dropout=dropout)))
        return model.train()


@dataclass(frozen=True)
class ExpertsShape(DecoderShape):
    """Sizes of a decoder with a mixture of experts."""

    # Rounding can change the router's choice between two experts with nearly equal scores.
    tolerance: ClassVar[float] = 6e-5

    num_local_experts: int = 4
    num_experts_per_tok: int = 2

    @property
    def has_routers(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class LlamaShape(DecoderShape):
    """Sizes of a ``LlamaForCausalLM``."""

    family: ClassVar[str] = "llama"
    model_class: ClassVar[str] = "LlamaForCausalLM"


@dataclass(frozen=True)
class Qwen3Shape(DecoderShape):
    """Sizes of a ``Qwen3ForCausalLM``."""

    family: ClassVar[str] = "qwen3"
    model_class: ClassVar[str] = "Qwen3ForCausalLM"

    head_dim: int = 16


@dataclass(frozen=True)
class Gemma3Shape(DecoderShape):
    """Sizes of a ``Gemma3ForCausalLM``; layers of sliding and of full attention alternate."""

    family: ClassVar[str] = "gemma3"
    model_class: ClassVar[str] = "Gemma3ForCausalLM"

    head_dim: int = 16
    sliding_window: int = 16

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration."""
        return super().options(dropout=dropout) | {
            "query_pre_attn_scalar": self.head_dim,
            "layer_types": alternating_layers(self.num_hidden_layers),
        }


@dataclass(frozen=True)
class MixtralShape(ExpertsShape):
    """Sizes of a ``MixtralForCausalLM``."""

    family: ClassVar[str] = "mixtral"
    model_class: ClassVar[str] = "MixtralForCausalLM"

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration, without a sliding window."""
        return super().options(dropout=dropout) | {"sliding_window": None}


@dataclass(frozen=True)
class Qwen3MoeShape(ExpertsShape):
    """Sizes of a ``Qwen3MoeForCausalLM``; all layers have experts."""

    family: ClassVar[str] = "qwen3_moe"
    model_class: ClassVar[str] = "Qwen3MoeForCausalLM"
    tensor_parallel_sizes = ("num_attention_heads", "num_key_value_heads", "moe_intermediate_size")

    head_dim: int = 16
    moe_intermediate_size: int = 96

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration, with weights that sum to one."""
        return super().options(dropout=dropout) | {"norm_topk_prob": True}


@dataclass(frozen=True)
class GptOssShape(ExpertsShape):
    """Sizes of a ``GptOssForCausalLM``; layers of sliding and of full attention alternate."""

    family: ClassVar[str] = "gpt_oss"
    model_class: ClassVar[str] = "GptOssForCausalLM"

    head_dim: int = 16
    sliding_window: int = 16

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration.

        Attention is eager: transformers has no scaled_dot_product_attention with sinks.
        """
        return super().options(dropout=dropout) | {
            "max_position_embeddings": 131072,  # as its rotary embeddings are scaled for
            "attn_implementation": "eager",
            "layer_types": alternating_layers(self.num_hidden_layers),
        }

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model, which makes masks of documents as transformers' others do."""
        model = super().build(dropout=dropout)
        decoder = model.get_submodule("model")
        decoder.register_forward_pre_hook(_add_document_masks, with_kwargs=True)
        return model


def _add_document_masks(
    decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adds GPT-OSS's masks by kind of layer, for which transformers does not use positions."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return args, kwargs
    from transformers import masking_utils

    given: Any = {
        "config": decoder.config,
        "inputs_embeds": torch.empty(*positions.shape, 0, device=positions.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }
    masks = {
        "full_attention": masking_utils.create_causal_mask(**given),
        "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
    }
    return args, {**kwargs, "attention_mask": masks}


@dataclass(frozen=True)
class DeepseekV3Shape(ExpertsShape):
    """Sizes of a ``DeepseekV3ForCausalLM``; the first layers have no experts."""

    family: ClassVar[str] = "deepseek_v3"
    model_class: ClassVar[str] = "DeepseekV3ForCausalLM"
    tensor_parallel_sizes = (
        "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
    )  # fmt: skip

    moe_intermediate_size: int = 96
    first_k_dense_replace: int = 1
    n_group: int = 2
    topk_group: int = 1
    q_lora_rank: int = 32
    kv_lora_rank: int = 16
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 16

    @property
    def has_expert_biases(self) -> bool:
        """True."""
        return True


def alternating_layers(number: int) -> list[str]:
    """Returns the kinds of attention of layers, the first of which has a sliding window."""
    kinds = ("sliding_attention", "full_attention")
    return [kinds[layer % 2] for layer in range(number)]


# 0.1 M parameters, for tests.
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_TINY_EXPERTS = _TINY | {"intermediate_size": 96}
_LLAMA_TINY = LlamaShape(**_TINY)
DECODERS: dict[str, DecoderShape] = {
    # 9.9 M parameters: a step of 8 x 64 tokens takes about half a second on one CPU core.
    "llama-10m": LlamaShape(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    # 3.7 M parameters beside embeddings, which learn the words and the syntax of a text in an hour.
    "llama-3m": LlamaShape(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "llama-tiny": _LLAMA_TINY,
    # With one matrix for embedding and head.
    "llama-tied-tiny": replace(_LLAMA_TINY, tie_word_embeddings=True),
    # 9.5 M parameters, of which a token uses 5.8 M.
    "mixtral-10m": MixtralShape(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    # 0.2 M parameters, for tests, as are those that follow.
    "mixtral-tiny": MixtralShape(**_TINY_EXPERTS),
    "qwen3-tiny": Qwen3Shape(**_TINY),
    "gemma3-tiny": Gemma3Shape(**_TINY, tie_word_embeddings=True),
    "qwen3-moe-tiny": Qwen3MoeShape(**_TINY_EXPERTS),
    "gpt-oss-tiny": GptOssShape(**_TINY_EXPERTS),
    "deepseek-v3-tiny": DeepseekV3Shape(**_TINY),
}
