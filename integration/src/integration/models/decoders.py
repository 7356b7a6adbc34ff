"""Hugging Face's LLaMA and Mixtral, unmodified."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from torch import nn

from integration.data.tokenizer import BYTE_VOCABULARY
from integration.models.shape import ModelShape


@dataclass(frozen=True)
class DecoderShape(ModelShape):
    """Sizes of a decoder; fields are named as in ``transformers.LlamaConfig``."""

    tensor_parallel_sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

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


@dataclass(frozen=True)
class LlamaShape(DecoderShape):
    """Sizes of a ``LlamaForCausalLM``."""

    family: ClassVar[str] = "llama"

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model; ``dropout`` is of attention's weights."""
        # Imported on use, as it takes seconds and options are validated without a model.
        from transformers import LlamaConfig, LlamaForCausalLM

        model: nn.Module = LlamaForCausalLM(LlamaConfig(**self.options(dropout=dropout)))
        return model.train()


@dataclass(frozen=True)
class MixtralShape(DecoderShape):
    """Sizes of a ``MixtralForCausalLM``."""

    family: ClassVar[str] = "mixtral"
    # Rounding can change the router's choice between two experts with nearly equal scores.
    tolerance: ClassVar[float] = 6e-5

    num_local_experts: int = 4
    num_experts_per_tok: int = 2

    def options(self, *, dropout: float) -> dict[str, Any]:
        """Returns the arguments of the model's configuration, without a sliding window."""
        return super().options(dropout=dropout) | {"sliding_window": None}

    def build(self, *, dropout: float) -> nn.Module:
        """Returns the model; ``dropout`` is of attention's weights."""
        from transformers import MixtralConfig, MixtralForCausalLM

        model: nn.Module = MixtralForCausalLM(MixtralConfig(**self.options(dropout=dropout)))
        return model.train()


# 0.1 M parameters, for tests.
_LLAMA_TINY = LlamaShape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
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
    # 0.2 M parameters, for tests.
    "mixtral-tiny": MixtralShape(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
}
