"""The parameter lists of known architectures, computed from a configuration alone.

Names, shapes and order are those of the Hugging Face implementation: within a layer, the order in
which ``named_parameters()`` lists them, which is the order of the buffer that FSDP makes. Tests
compare every architecture here with the model that transformers builds.

Routed experts come in two layouts. "separate": every expert's matrices are tensors of their own,
as in the published checkpoints and in transformers before version 5. "stacked": one tensor per
kind of matrix holds all experts, as in transformers 5, and always in gpt-oss.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ragged_shard.planner.hf_config import Config
from ragged_shard.planner.model import Group, Kind, Model, Parameter

ExpertLayout = Literal["separate", "stacked"]
Parameters = Iterator[Parameter]


@dataclass(frozen=True)
class Architecture:
    """How one ``model_type`` is built.

    Attributes:
        attention: The parameters of a layer's attention.
        mlp: Those of a layer's feed-forward network, from the layer's number and the layout that
            its routed experts are to have.
        published: The layout of the experts in the published checkpoints.
    """

    attention: Callable[[Config], Parameters]
    mlp: Callable[[Config, int, ExpertLayout], Parameters]
    published: ExpertLayout = "separate"


def build_model(
    config: Config, *, experts: ExpertLayout | None = None, with_mtp: bool = False
) -> Model:
    """The parameters of a configured model, one group per layer and ``root`` for the rest.

    Args:
        config: The configuration.
        experts: How routed experts are held; by default as in the published checkpoints.
        with_mtp: Adds the layers of multi-token prediction (``num_nextn_predict_layers``), each a
            group of its own, without the embedding and head that they share with the model.

    Raises:
        ValueError: The architecture is unknown, lacks what was asked for, or the configuration
            lacks a size or has an impossible one.
    """
    architecture = _architecture(config)
    layout = experts or architecture.published
    if architecture.published == "stacked" and layout == "separate":
        raise ValueError(f"{config.name}: {config.architecture} has its experts stacked only")
    depth = config.size("num_hidden_layers")
    groups = [
        Group(f"layers.{layer}", tuple(_layer(config, architecture, layer, layout)))
        for layer in range(depth)
    ]
    if with_mtp:
        extra = config.size("num_nextn_predict_layers", 0, least=0)
        if not extra or not config.has("first_k_dense_replace"):
            raise ValueError(
                f"{config.name} has no layers of multi-token prediction; "
                f"leave them out, only DeepSeek-V3 and its kin have them"
            )
        groups += [
            Group(f"layers.{layer}", tuple(_mtp(config, architecture, layer, layout)))
            for layer in range(depth, depth + extra)
        ]
    groups.append(Group("root", tuple(_root(config))))
    return Model(config.name, tuple(groups))


def _architecture(config: Config) -> Architecture:
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        raise ValueError(
            f"{config.name}: architecture {config.architecture!r} is unknown; "
            f"known are {', '.join(sorted(ARCHITECTURES))}"
        )
    return found


def _root(config: Config) -> Parameters:
    vocabulary, hidden = config.size("vocab_size"), config.size("hidden_size")
    yield Parameter("embed_tokens.weight", (vocabulary, hidden))
    yield _vector("norm.weight", hidden)
    tied = config.architecture in TIED_BY_DEFAULT
    if not config.flag("tie_word_embeddings", default=tied):
        yield Parameter("lm_head.weight", (vocabulary, hidden))


def _layer(
    config: Config, architecture: Architecture, layer: int, layout: ExpertLayout
) -> Parameters:
    yield from _prefixed("self_attn", architecture.attention(config))
    yield from architecture.mlp(config, layer, layout)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _vector(f"{norm}.weight", config.size("hidden_size"))


def _mtp(
    config: Config, architecture: Architecture, layer: int, layout: ExpertLayout
) -> Parameters:
    # The names of the checkpoint, see README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
    hidden = config.size("hidden_size")
    yield _vector("enorm.weight", hidden)
    yield _vector("hnorm.weight", hidden)
    yield Parameter("eh_proj.weight", (hidden, 2 * hidden))
    yield from _layer(config, architecture, layer, layout)
    yield _vector("shared_head.norm.weight", hidden)


def _vector(name: str, size: int) -> Parameter:
    return Parameter(name, (size,), "other")


def _prefixed(prefix: str, parameters: Parameters) -> Parameters:
    for parameter in parameters:
        yield Parameter(f"{prefix}.{parameter.name}", parameter.shape, parameter.kind)


def _linear(
    name: str, out: int, inner: int, *, bias: bool = False, kind: Kind = "matrix"
) -> Parameters:
    yield Parameter(f"{name}.weight", (out, inner), kind)
    if bias:
        yield _vector(f"{name}.bias", out)


# Attention -------------------------------------------------------------------------------------


def _head_dim(config: Config) -> int:
    if config.has("head_dim"):
        return config.size("head_dim")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    found = HEAD_DIM.get(config.architecture)
    if found is None and hidden % heads:
        raise ValueError(
            f"{config.name}: hidden_size is {hidden}, no multiple of num_attention_heads, {heads}; "
            f"give head_dim"
        )
    return found or hidden // heads


def _grouped_query(config: Config, *, qkv_bias: bool, out_bias: bool) -> Parameters:
    hidden, heads, width = (
        config.size("hidden_size"),
        config.size("num_attention_heads"),
        _head_dim(config),
    )
    # Early LLaMAs have no such key; elsewhere its absence would mean a default that varies.
    key_value = config.size(
        "num_key_value_heads", heads if config.architecture == "llama" else None
    )
    yield from _linear("q_proj", heads * width, hidden, bias=qkv_bias)
    yield from _linear("k_proj", key_value * width, hidden, bias=qkv_bias)
    yield from _linear("v_proj", key_value * width, hidden, bias=qkv_bias)
    yield from _linear("o_proj", hidden, heads * width, bias=out_bias)


def _llama_attention(config: Config) -> Parameters:
    bias = config.flag("attention_bias", default=False)
    yield from _grouped_query(config, qkv_bias=bias, out_bias=bias)


def _mistral_attention(config: Config) -> Parameters:
    yield from _grouped_query(config, qkv_bias=False, out_bias=False)


def _qwen2_attention(config: Config) -> Parameters:
    bias = config.flag("qkv_bias", default=True)
    yield from _grouped_query(config, qkv_bias=bias, out_bias=False)


def _qwen3_attention(config: Config) -> Parameters:
    yield from _llama_attention(config)
    width = _head_dim(config)
    yield _vector("q_norm.weight", width)
    yield _vector("k_norm.weight", width)


def _gpt_oss_attention(config: Config) -> Parameters:
    bias = config.flag("attention_bias", default=True)
    yield _vector("sinks", config.size("num_attention_heads"))
    yield from _grouped_query(config, qkv_bias=bias, out_bias=bias)


def _latent_attention(config: Config) -> Parameters:
    """Multi-head latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    plain, rotary = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
    value, rank = config.size("v_head_dim"), config.size("kv_lora_rank")
    bias = config.flag("attention_bias", default=False)
    if "q_lora_rank" not in config.values or config.has("q_lora_rank"):  # null: no low rank
        query = config.size("q_lora_rank")
        yield from _linear("q_a_proj", query, hidden, bias=bias)
        yield _vector("q_a_layernorm.weight", query)
        yield from _linear("q_b_proj", heads * (plain + rotary), query)
    else:
        yield from _linear("q_proj", heads * (plain + rotary), hidden)
    yield from _linear("kv_a_proj_with_mqa", rank + rotary, hidden, bias=bias)
    yield _vector("kv_a_layernorm.weight", rank)
    yield from _linear("kv_b_proj", heads * (plain + value), rank)
    yield from _linear("o_proj", hidden, heads * value, bias=bias)


# Feed-forward networks --------------------------------------------------------------------------


def _gated(
    prefix: str, hidden: int, inner: int, *, bias: bool = False, kind: Kind = "matrix"
) -> Parameters:
    yield from _linear(f"{prefix}.gate_proj", inner, hidden, bias=bias, kind=kind)
    yield from _linear(f"{prefix}.up_proj", inner, hidden, bias=bias, kind=kind)
    yield from _linear(f"{prefix}.down_proj", hidden, inner, bias=bias, kind=kind)


def _experts(prefix: str, count: int, hidden: int, inner: int, layout: ExpertLayout) -> Parameters:
    if layout == "separate":
        for expert in range(count):
            yield from _gated(f"{prefix}.{expert}", hidden, inner, kind="expert")
    else:
        yield Parameter(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden), "expert")
        yield Parameter(f"{prefix}.down_proj", (count, hidden, inner), "expert")


def _expert_count(config: Config) -> int:
    # transformers 5 saves as num_local_experts what Qwen published as num_experts.
    return config.size("num_experts" if config.has("num_experts") else "num_local_experts")


def _dense_mlp(config: Config, layer: int, layout: ExpertLayout) -> Parameters:
    bias = config.flag("mlp_bias", default=False)
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    yield from _gated("mlp", hidden, inner, bias=bias)


def _mixtral_mlp(config: Config, layer: int, layout: ExpertLayout) -> Parameters:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    count = _expert_count(config)
    prefix = "block_sparse_moe" if layout == "separate" else "mlp"
    yield Parameter(f"{prefix}.gate.weight", (count, hidden))
    if layout == "stacked":
        yield from _experts(f"{prefix}.experts", count, hidden, inner, layout)
        return
    for expert in range(count):  # Mistral's own names: w1 is the gate, w3 goes up, w2 down
        for name, out, into in (
            ("w1", inner, hidden),
            ("w2", hidden, inner),
            ("w3", inner, hidden),
        ):
            yield from _linear(f"{prefix}.experts.{expert}.{name}", out, into, kind="expert")


def _qwen_mlp(config: Config, layer: int, layout: ExpertLayout) -> Parameters:
    step = config.size("decoder_sparse_step", 1)
    if layer in config.layers("mlp_only_layers") or (layer + 1) % step:
        yield from _gated("mlp", config.size("hidden_size"), config.size("intermediate_size"))
        return
    hidden, inner = config.size("hidden_size"), config.size("moe_intermediate_size")
    count = _expert_count(config)
    experts = _experts("mlp.experts", count, hidden, inner, layout)
    gate = Parameter("mlp.gate.weight", (count, hidden))
    if config.architecture == "qwen3_moe" and layout == "stacked":
        yield from (*experts, gate)  # transformers 5 turned the two round, here only
    else:
        yield from (gate, *experts)
    if config.architecture == "qwen2_moe":
        shared = config.size("shared_expert_intermediate_size")
        yield from _gated("mlp.shared_expert", hidden, shared)
        yield Parameter("mlp.shared_expert_gate.weight", (1, hidden))


def _deepseek_mlp(config: Config, layer: int, layout: ExpertLayout) -> Parameters:
    hidden = config.size("hidden_size")
    sparse = layer >= config.size("first_k_dense_replace", least=0)
    if not sparse or layer % config.size("moe_layer_freq", 1):
        yield from _gated("mlp", hidden, config.size("intermediate_size"))
        return
    count, inner = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    yield from _experts("mlp.experts", count, hidden, inner, layout)
    yield Parameter("mlp.gate.weight", (count, hidden))
    if layout == "separate":
        # A parameter of the checkpoint and of DeepSeek's own code, a buffer in transformers 5.
        yield _vector("mlp.gate.e_score_correction_bias", count)
    shared = config.size("n_shared_experts", least=0)
    if shared:
        yield from _gated("mlp.shared_experts", hidden, shared * inner)


def _gpt_oss_mlp(config: Config, layer: int, layout: ExpertLayout) -> Parameters:
    hidden, inner = config.size("hidden_size"), config.size("intermediate_size")
    count = _expert_count(config)
    yield Parameter("mlp.router.weight", (count, hidden))
    yield _vector("mlp.router.bias", count)
    yield Parameter("mlp.experts.gate_up_proj", (count, hidden, 2 * inner), "expert")
    yield Parameter("mlp.experts.gate_up_proj_bias", (count, 2 * inner), "other")
    yield Parameter("mlp.experts.down_proj", (count, inner, hidden), "expert")
    yield Parameter("mlp.experts.down_proj_bias", (count, hidden), "other")


#: Heads' width where a config.json leaves it out and it is not hidden_size / heads.
HEAD_DIM: Mapping[str, int] = {"qwen3": 128, "gpt_oss": 64}

#: Architectures that share embedding and head unless config.json says otherwise.
TIED_BY_DEFAULT = frozenset({"smollm3"})

#: Every known ``model_type``.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama_attention, _dense_mlp),
    "mistral": Architecture(_mistral_attention, _dense_mlp),
    "smollm3": Architecture(_llama_attention, _dense_mlp),
    "qwen2": Architecture(_qwen2_attention, _dense_mlp),
    "qwen3": Architecture(_qwen3_attention, _dense_mlp),
    "mixtral": Architecture(_mistral_attention, _mixtral_mlp),
    "qwen2_moe": Architecture(_qwen2_attention, _qwen_mlp),
    "qwen3_moe": Architecture(_qwen3_attention, _qwen_mlp),
    "deepseek_v3": Architecture(_latent_attention, _deepseek_mlp),
    "kimi_k2": Architecture(_latent_attention, _deepseek_mlp),
    "gpt_oss": Architecture(_gpt_oss_attention, _gpt_oss_mlp, "stacked"),
}
