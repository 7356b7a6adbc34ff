"""Public models by name: the sizes of their published configurations, and where those stand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ragged_shard.planner.architectures import ExpertLayout, build_model
from ragged_shard.planner.hf_config import Config
from ragged_shard.planner.model import Model


@dataclass(frozen=True)
class Preset:
    """One public model.

    Attributes:
        source: The repository on the Hugging Face hub whose config.json ``values`` are from.
        parameters: The published number of parameters.
        values: What of that config.json decides the parameters.
    """

    source: str
    parameters: int
    values: Mapping[str, Any]


def preset_model(
    name: str, *, experts: ExpertLayout | None = None, with_mtp: bool = False
) -> Model:
    """The parameters of a preset.

    Args:
        name: A key of ``PRESETS``, such as ``"deepseek-v3"``.
        experts: How routed experts are held; by default as published.
        with_mtp: Adds the layer of multi-token prediction, which deepseek-v3 has.

    Raises:
        ValueError: No preset has this name, or the model lacks what was asked for.
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; known are {', '.join(PRESETS)}")
    return build_model(Config(name, PRESETS[name].values), experts=experts, with_mtp=with_mtp)


def _llama3(layers: int, hidden: int, inner: int, heads: int) -> Mapping[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }


#: The presets, by the name that the command line takes.
PRESETS: Mapping[str, Preset] = {
    "llama3-8b": Preset("meta-llama/Meta-Llama-3-8B", 8_030_261_248, _llama3(32, 4096, 14336, 32)),
    "llama3-70b": Preset(
        "meta-llama/Meta-Llama-3-70B", 70_553_706_496, _llama3(80, 8192, 28672, 64)
    ),
    "llama3-405b": Preset(
        "meta-llama/Llama-3.1-405B", 405_853_388_800, _llama3(126, 16384, 53248, 128)
    ),
    "mixtral-8x7b": Preset(
        "mistralai/Mixtral-8x7B-v0.1",
        46_702_792_704,
        {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "tie_word_embeddings": False,
        },
    ),
    "deepseek-v3": Preset(
        "deepseek-ai/DeepSeek-V3",
        671_026_419_200,  # the main model, without multi-token prediction
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "gpt-oss-120b": Preset(
        "openai/gpt-oss-120b",
        116_829_156_672,
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}
