"""Shapes of configured models: those of transformers' model, and of published checkpoints."""

import sys

import pytest

from ragged_shard.planner.models.config import ModelConfig
from ragged_shard.planner.models.hugging_face import build_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

SMALL = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
MOE = SMALL | {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = MOE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
# Each case is a name that can be read aloud, an architecture, and its configuration.
CASES = {
    "llama": ("llama", SMALL),
    "llama with biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("llama", SMALL | {"tie_word_embeddings": True}),
    "llama with wide heads": ("llama", SMALL | {"head_dim": 20}),
    "mistral": ("mistral", SMALL),
    "smollm3": ("smollm3", SMALL),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", SMALL),
    "qwen3 with narrow heads": ("qwen3", SMALL | {"head_dim": 16, "attention_bias": True}),
    "mixtral": ("mixtral", SMALL | {"num_local_experts": 5}),
    "qwen2_moe": (
        "qwen2_moe",
        MOE | {"num_experts": 6, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen2_moe without biases": (
        "qwen2_moe",
        MOE | {"num_experts": 6, "shared_expert_intermediate_size": 40, "qkv_bias": False},
    ),
    "qwen3_moe, every other layer sparse": (
        "qwen3_moe",
        MOE | {"num_experts": 6, "decoder_sparse_step": 2},
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3 with two shared experts": ("deepseek_v3", LATENT | {"n_shared_experts": 2}),
    "deepseek_v3 with biases": ("deepseek_v3", LATENT | {"attention_bias": True}),
    "deepseek_v3 without a low rank of queries": ("deepseek_v3", LATENT | {"q_lora_rank": None}),
    "gpt_oss": ("gpt_oss", SMALL | {"num_local_experts": 5}),
    "gpt_oss without biases": (
        "gpt_oss",
        SMALL | {"num_local_experts": 5, "attention_bias": False, "head_dim": 12},
    ),
}


def shapes_of(config, **options):
    """Every parameter's shape by its name in the whole model, in the order of the buffers."""
    model = build_model(config, **options)
    return {
        (f"{group.name}." if group.name != "root" else "") + parameter.name: parameter.shape
        for group in model.groups
        for parameter in group.parameters
    }


def transformers_model(architecture, values):
    """The shapes of transformers' model, layers first, and the config.json it would save."""
    config = transformers.AutoConfig.for_model(architecture, **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {
        name.removeprefix("model."): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
    }
    layers = {name: shape for name, shape in shapes.items() if name.startswith("layers.")}
    return layers | shapes, config.to_diff_dict()


@pytest.mark.parametrize(("architecture", "values"), CASES.values(), ids=CASES.keys())
def test_names_shapes_and_order_are_those_of_transformers(architecture, values):
    expected, saved = transformers_model(architecture, values)
    config = ModelConfig("toy", saved | {"model_type": architecture})
    assert list(shapes_of(config, experts="stacked").items()) == list(expected.items())


def sizes(vocabulary, hidden, inner, layers, heads, key_value, **others):
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        **others,
    }


# The sizes in the config.json of public models, and their parameters as the Hugging Face hub's
# total of `safetensors`, or general.parameter_count of their GGUF files, gives them.
PUBLISHED = {
    "Mistral-7B-v0.1": ("mistral", sizes(32000, 4096, 14336, 32, 32, 8), 7_241_732_096),
    "SmolLM3-3B": ("smollm3", sizes(128256, 2048, 11008, 36, 16, 4), 3_075_098_624),
    "Qwen2.5-0.5B": (
        "qwen2",
        sizes(151936, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen3-0.6B": (
        "qwen3",
        sizes(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": ("qwen3", sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    "Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        sizes(151936, 2048, 5632, 24, 16, 16, num_experts=60, moe_intermediate_size=1408)
        | {"shared_expert_intermediate_size": 5632},
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        sizes(151936, 2048, 6144, 48, 32, 4, num_experts=128, moe_intermediate_size=768)
        | {"head_dim": 128},
        30_532_122_624,
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        sizes(201088, 2880, 2880, 24, 64, 8, head_dim=64, num_local_experts=32),
        20_914_757_184,
    ),
}


@pytest.mark.parametrize(("architecture", "values", "total"), PUBLISHED.values(), ids=PUBLISHED)
def test_public_models_have_as_many_parameters_as_published(architecture, values, total):
    assert build_model(ModelConfig("toy", values | {"model_type": architecture})).numel == total


def test_kimi_is_deepseek():
    kimi, deepseek = (
        ModelConfig("toy", LATENT | {"model_type": name}) for name in ("kimi_k2", "deepseek_v3")
    )
    assert build_model(kimi) == build_model(deepseek)


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"])
def test_separate_experts_are_the_stacked_ones_cut_apart(architecture):
    values = LATENT | {
        "model_type": architecture,
        "num_local_experts": 6,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
    }
    config = ModelConfig("toy", values)
    separate, stacked = (build_model(config, experts=layout) for layout in ("separate", "stacked"))
    for apart, together in zip(separate.groups, stacked.groups, strict=True):
        rows = [p for p in apart.parameters if p.kind == "expert"]
        assert sum(p.numel for p in rows) == sum(
            p.numel for p in together.parameters if p.kind == "expert"
        )
        assert len(rows) == 9 * len([p for p in together.parameters if p.kind == "expert"])
        assert all(len(p.shape) == 2 for p in rows)
    # A parameter of the checkpoint, but a buffer of transformers' model.
    correction = 2 * 6 if architecture == "deepseek_v3" else 0
    assert separate.numel == stacked.numel + correction


def test_mixtral_apart_has_the_names_of_its_checkpoint():
    config = ModelConfig("toy", SMALL | {"model_type": "mixtral", "num_local_experts": 2})
    names = [p.name for p in build_model(config).groups[0].parameters if p.kind != "other"]
    # As in model.safetensors.index.json of mistralai/Mixtral-8x7B-v0.1.
    assert names == [
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        "block_sparse_moe.gate.weight",
        *(f"block_sparse_moe.experts.{e}.w{n}.weight" for e in (0, 1) for n in (1, 2, 3)),
    ]


def test_experts_alone_are_of_their_kind():
    config = ModelConfig("toy", SMALL | {"model_type": "gpt_oss", "num_local_experts": 5})
    kinds = {p.name: p.kind for p in build_model(config).groups[0].parameters}
    assert {name for name, kind in kinds.items() if kind == "expert"} == {
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    for vectors in (
        "mlp.experts.gate_up_proj_bias",
        "mlp.experts.down_proj_bias",
        "self_attn.sinks",
    ):
        assert kinds[vectors] == "other"
    assert kinds["mlp.router.weight"] == kinds["self_attn.q_proj.weight"] == "matrix"


def test_layers_of_multi_token_prediction_are_groups_of_their_own():
    config = ModelConfig(
        "toy", LATENT | {"model_type": "deepseek_v3", "num_nextn_predict_layers": 2}
    )
    plain, extended = build_model(config), build_model(config, with_mtp=True)
    assert [group.name for group in extended.groups] == [*(f"layers.{i}" for i in range(5)), "root"]
    names = [parameter.name for parameter in extended.groups[3].parameters]
    assert names[:3] == ["enorm.weight", "hnorm.weight", "eh_proj.weight"]
    assert names[-1] == "shared_head.norm.weight"
    assert extended.groups[3].parameters[3:-1] == plain.groups[2].parameters


def test_gpt2_has_a_group_per_block():
    model = build_model(ModelConfig("toy", {"model_type": "gpt2", "n_embd": 8, "n_head": 2}))
    assert [group.name for group in model.groups] == [*(f"layers.{i}" for i in range(12)), "root"]
    assert [parameter.name for parameter in model.groups[-1].parameters][:2] == [
        "wte.weight",
        "wpe.weight",
    ]


def test_quantization_and_remote_code_are_ignored():
    plain = SMALL | {"model_type": "llama"}
    extra = {
        "quantization_config": {"quant_method": "fp8"},
        "auto_map": {"AutoModelForCausalLM": "modeling_toy.Toy"},
    }
    assert build_model(ModelConfig("toy", plain | extra)) == build_model(ModelConfig("toy", plain))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "no-such-model"}, "toy: transformers .* cannot build a 'no-such-model'"),
        ({"model_type": None}, "toy: expected the architecture's name as model_type, got None"),
        ({"hidden_size": "wide"}, "toy: transformers .* cannot build a 'llama'.*hidden_size"),
        ({"vocab_size": -5}, "toy: transformers .* cannot build a 'llama'"),
    ],
)
def test_a_configuration_that_cannot_be_built_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        build_model(ModelConfig("toy", {"model_type": "llama"} | SMALL | changed))


def test_a_missing_library_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers: pip install ragged-shard\[models\]"):
        build_model(ModelConfig("toy", SMALL | {"model_type": "llama"}))


def test_what_an_architecture_does_not_have_cannot_be_asked_for():
    gpt = ModelConfig("toy", SMALL | {"model_type": "gpt_oss", "num_local_experts": 5})
    with pytest.raises(ValueError, match="gpt_oss, which has its experts stacked only"):
        build_model(gpt, experts="separate")
    with pytest.raises(ValueError, match="toy has no layers of multi-token prediction"):
        build_model(gpt, with_mtp=True)
