"""The presets have exactly the parameters that are published."""

import hashlib
import json

import pytest

from ragged_shard.planner.models.config import ModelConfig
from ragged_shard.planner.models.presets import PRESETS, preset_model
from ragged_shard.planner.models.write_presets import layouts_of

# Llama 3 and Mixtral: the total of `safetensors` that the Hugging Face hub gives. gpt-oss-120b:
# general.parameter_count of its GGUF, as the hub's total counts packed MXFP4 bytes; the model card
# says 116.83 B. DeepSeek-V3: the main model of README_WEIGHTS.md, 671 B; to the last parameter it
# follows from the hub's total, see below.
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
}
# The tensors of the checkpoints' model.safetensors.index.json, FP8 scales left out.
TENSORS = {"llama3-8b": 291, "llama3-70b": 723, "mixtral-8x7b": 995, "deepseek-v3": 45_395}
LARGER = ("llama3-70b", "llama3-405b")  # than a model of the same class
# Of the groups' names, and of the names, shapes and kinds of their parameters, in order: figures
# of padding depend on all of them.
PUBLISHED_DIGESTS = {
    "llama3-8b": "4cc1064450fb95d8",
    "llama3-70b": "e8ab9e9e024b3d7b",
    "llama3-405b": "cdba148e34dfdbb9",
    "mixtral-8x7b": "12edf9ffe02976ce",
    "deepseek-v3": "1a6fe7b3a190559f",
    "gpt-oss-120b": "705b15b9709fee59",
}
STACKED_DIGESTS = PUBLISHED_DIGESTS | {
    "mixtral-8x7b": "5964da3659131bf0",
    "deepseek-v3": "52f8f2deda6879f6",
}


def digest(model):
    groups = [
        (group.name, [(p.name, p.shape, p.kind) for p in group.parameters])
        for group in model.groups
    ]
    return hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", PRESETS)
def test_names_shapes_and_order_do_not_change(name):
    assert digest(preset_model(name)) == PUBLISHED_DIGESTS[name]
    assert digest(preset_model(name, experts="stacked")) == STACKED_DIGESTS[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LARGER else ()) for name in PRESETS],
)
def test_the_stored_shapes_are_those_that_transformers_builds(name):
    pytest.importorskip("transformers", minversion="5")
    built = json.loads(json.dumps(layouts_of(ModelConfig(name, PRESETS[name].values))))
    assert built == PRESETS[name].layouts, "run python -m ragged_shard.planner.models.write_presets"


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameters_are_as_many_as_published(name):
    assert preset_model(name).numel == PUBLISHED[name] == PRESETS[name].parameters


@pytest.mark.parametrize("name", TENSORS)
def test_the_tensors_are_as_many_as_in_the_checkpoint(name):
    assert sum(len(group.parameters) for group in preset_model(name).groups) == TENSORS[name]


def test_deepseek_with_multi_token_prediction_is_the_whole_checkpoint():
    # The hub's safetensors totals by dtype: BF16 and F8_E4M3 are all weights. Of F32, 256 for each
    # of the 59 sparse layers are weights, the rest FP8 scales. The checkpoint repeats embedding and
    # head in layer 61 (README_WEIGHTS.md), which are shared.
    repeated = 2 * 129280 * 7168
    checkpoint = 3_918_786_560 + 680_571_043_840 + 59 * 256
    assert preset_model("deepseek-v3", with_mtp=True).numel + repeated == checkpoint


def test_there_is_a_group_for_every_layer_and_one_for_the_rest():
    names = [group.name for group in preset_model("gpt-oss-120b").groups]
    assert names == [*(f"layers.{layer}" for layer in range(36)), "root"]


def test_the_first_three_layers_of_deepseek_are_dense():
    experts = [
        sum(parameter.kind == "expert" for parameter in group.parameters)
        for group in preset_model("deepseek-v3").groups
    ]
    assert experts == [0] * 3 + [3 * 256] * 58 + [0]


def test_experts_can_be_stacked():
    layer = preset_model("mixtral-8x7b", experts="stacked").groups[0]
    assert [p.shape for p in layer.parameters if p.kind == "expert"] == [
        (8, 2 * 14336, 4096),
        (8, 4096, 14336),
    ]


def test_an_unknown_preset_is_named_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"expected one of the presets llama3-8b, .*-120b, got 'llama4'"
    ):
        preset_model("llama4")
