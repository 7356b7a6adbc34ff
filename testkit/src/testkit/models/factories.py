"""Small single-device models: a pair of Linears, and models of transformers.

transformers is imported where it is used: testkit does not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = [
    "VOCABULARY", "TwoLinears", "aria", "causal_lm", "deepseek_v2", "deepseek_v3", "gemma3",
    "gpt2", "gpt_oss", "granite_swa", "llama", "llama4", "mixtral", "nowhere_zero", "qwen3",
    "qwen3_moe", "reinitialize", "vit",
]  # fmt: skip

VOCABULARY = 64


class TwoLinears(nn.Module):
    """4 features to 8 and back, and a loss of them; always the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out."""
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return y.square().mean()


_DECODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
    "use_cache": False, "attn_implementation": "eager",
}  # fmt: skip
_EXPERTS = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def _seeded(cls: Any, config: Any) -> nn.Module:
    """Makes a model in training mode, always with the same parameters."""
    torch.manual_seed(0)
    model: nn.Module = cls(config)
    return model.train()


def llama(**changes: Any) -> nn.Module:
    """LLaMA of transformers: 2 layers of 32 features, 4 heads, 2 key-value heads.

    Args:
        changes: to its config.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    return _seeded(LlamaForCausalLM, LlamaConfig(**_DECODER | changes))


def qwen3(**changes: Any) -> nn.Module:
    """Qwen3 of transformers: sizes as `llama`, heads of 8 features that are normalized.

    Args:
        changes: to its config.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _seeded(Qwen3ForCausalLM, Qwen3Config(**_DECODER | {"head_dim": 8} | changes))


def gemma3(**changes: Any) -> nn.Module:
    """The text model of Gemma 3 of transformers: sizes as `qwen3`, a layer with a window of 4.

    Embeddings are tied and scaled.

    Args:
        changes: to its config.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    options = _DECODER | {"head_dim": 8, "query_pre_attn_scalar": 8} | _WINDOW
    return _seeded(Gemma3ForCausalLM, Gemma3TextConfig(**options | changes))


def mixtral(**changes: Any) -> nn.Module:
    """Mixtral of transformers: 2 layers of 32 features, 4 heads, 2 of 4 experts of 48 features.

    Args:
        changes: to its config.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    options = _DECODER | _EXPERTS | {"sliding_window": None}
    return _seeded(MixtralForCausalLM, MixtralConfig(**options | changes))


def qwen3_moe(**changes: Any) -> nn.Module:
    """Qwen3's mixture of experts of transformers: experts as `mixtral`, heads as `qwen3`.

    Args:
        changes: to its config.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
    options = _DECODER | experts | {"head_dim": 8, "norm_topk_prob": True}
    return _seeded(Qwen3MoeForCausalLM, Qwen3MoeConfig(**options | changes))


def gpt_oss(**changes: Any) -> nn.Module:
    """GPT-OSS of transformers: experts as `mixtral`, a layer with a window of 4 tokens.

    Args:
        changes: to its config.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    options = _DECODER | _EXPERTS | {"head_dim": 8} | _WINDOW
    return _seeded(GptOssForCausalLM, GptOssConfig(**options | changes))


def deepseek_v3(**changes: Any) -> nn.Module:
    """DeepSeek-V3 of transformers: a layer with an MLP and one with experts; 4 heads.

    Latents of queries have 16 features, of keys and values 8; heads 8 features without positions
    and 4 with them. 2 of 4 experts of 48 features, of 2 groups, beside a shared expert.

    Args:
        changes: to its config.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    attention = {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "num_key_value_heads": 4,
    }  # fmt: skip
    experts = {
        "first_k_dense_replace": 1, "moe_intermediate_size": 48, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    }  # fmt: skip
    return _seeded(
        DeepseekV3ForCausalLM, DeepseekV3Config(**_DECODER | attention | experts | changes)
    )


def deepseek_v2(**changes: Any) -> nn.Module:
    """DeepSeek-V2 of transformers: sizes as `deepseek_v3`, without groups of experts.

    Args:
        changes: to its config.
    """
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    options = {
        "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }  # fmt: skip
    return _seeded(DeepseekV2ForCausalLM, DeepseekV2Config(**_DECODER | options | changes))


def llama4(**changes: Any) -> nn.Module:
    """The text model of Llama 4 of transformers: an MLP, and 1 of 4 experts beside a shared one.

    Args:
        changes: to its config.
    """
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    options = {
        "head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 4, "moe_layers": [1],
        "max_position_embeddings": 64, "attention_chunk_size": 64,
    }  # fmt: skip
    return _seeded(Llama4ForCausalLM, Llama4TextConfig(**_DECODER | options | changes))


def aria(**changes: Any) -> nn.Module:
    """The text model of Aria of transformers: 2 of 4 experts beside shared ones in each layer.

    Args:
        changes: to its config.
    """
    from transformers import AriaTextConfig, AriaTextForCausalLM

    experts = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}
    return _seeded(AriaTextForCausalLM, AriaTextConfig(**_DECODER | experts | changes))


def causal_lm(name: str, **changes: Any) -> nn.Module:
    """A decoder of transformers by the first part of its class's name, such as ``"Jamba"``.

    Args:
        name: of the class, before ``ForCausalLM``.
        changes: to its config, which has the sizes of `llama` where it takes them.
    """
    import transformers

    cls = getattr(transformers, f"{name}ForCausalLM")
    options = _DECODER | {"pad_token_id": 0} | changes
    return _seeded(cls, cls.config_class(**options))


def granite_swa(**changes: Any) -> nn.Module:
    """Granite with sinks of transformers: sizes as `llama`, a layer with a window of 4 tokens.

    Args:
        changes: to its config.
    """
    from transformers import GraniteSWAConfig, GraniteSWAForCausalLM

    options = {"sliding_window": 4, "tie_word_embeddings": False}
    return _seeded(GraniteSWAForCausalLM, GraniteSWAConfig(**_DECODER | options | changes))


def gpt2(**changes: Any) -> nn.Module:
    """GPT-2 of transformers: 2 layers of 32 features, 4 heads, dropout everywhere, tied embeddings.

    Args:
        changes: to its config.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": VOCABULARY,
        "use_cache": False, "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 1,
        "loss_type": "ForCausalLM",
    }  # fmt: skip
    return _seeded(GPT2LMHeadModel, GPT2Config(**options | changes))


def vit(**changes: Any) -> nn.Module:
    """ViT of transformers for 10 classes: 2 layers of 32 features, 4 heads, images of 3 x 16 x 16.

    Args:
        changes: to its config.
    """
    from transformers import ViTConfig, ViTForImageClassification

    options: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "num_labels": 10,
        "hidden_dropout_prob": 0.1, "attn_implementation": "sdpa",
    }  # fmt: skip
    return _seeded(ViTForImageClassification, ViTConfig(**options | changes))


def reinitialize(model: nn.Module, seed: int = 1) -> None:
    """Draws all parameters again, as the model itself does, wherever they are by now."""
    torch.manual_seed(seed)
    own: Any = model._init_weights  # transformers'
    for module in model.modules():
        if not dict(module.named_buffers(recurse=False)):  # they are not drawn
            own(module)


def nowhere_zero(model: nn.Module) -> nn.Module:
    """Draws all parameters: biases and gates begin at zero, which hides errors before them."""
    torch.manual_seed(5)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param.data, std=0.05)
    return model
