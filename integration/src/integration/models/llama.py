"""LLaMA shapes for byte-level language modelling; the model itself is Hugging Face's."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

# A byte is a token: no tokenizer, nothing to download, any file is training data.
BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class LlamaShape:
    """What decides a LLaMA's parameters; the names are those of ``transformers.LlamaConfig``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = BYTE_VOCABULARY
    tie_word_embeddings: bool = False

    def build(self, *, attention_dropout: float) -> nn.Module:
        """Return an unmodified fp32 ``LlamaForCausalLM``, drawn from torch's generator.

        With dropout its attention is the eager one, whose mask is an ordinary tensor operation.
        """
        # Imported here: it takes seconds, and options are checked without a model.
        from transformers import LlamaConfig, LlamaForCausalLM

        options: dict[str, Any] = asdict(self) | {
            "max_position_embeddings": 2048,
            "use_cache": False,
            "attention_dropout": attention_dropout,
            "attn_implementation": "eager" if attention_dropout else "sdpa",
        }
        config = LlamaConfig(**options)
        model: nn.Module = LlamaForCausalLM(config).train()
        return model


LLAMA_SHAPES: dict[str, LlamaShape] = {
    # 9.9 M parameters: a step of 8 x 64 tokens takes about half a second on one CPU core.
    "llama-10m": LlamaShape(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    # 0.1 M parameters, for tests.
    "llama-tiny": LlamaShape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
}
