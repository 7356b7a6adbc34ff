"""Exported float8 weights are the quantized master weights, as transformers reads them."""

import pytest
import torch
from safetensors.torch import load_file

from integration.hugging_face.__main__ import main as export
from integration.train.checkpoint.checkpoint import FOLDER
from plan_api import RECIPES
from plan_api.ops.low_precision.quantize import amax_of, quantize, scales_of
from testkit.mesh import mesh_of_one

EXCLUDED = "model.layers.1.self_attn.q_proj"
EXCLUDE = rf"lm_head|{EXCLUDED}"
STEP = "step-00000000"


def _save_step_0(folder, config):
    """Writes the checkpoint of a run with --precision before its first step."""
    from integration.train.config import TrainConfig
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    options = TrainConfig(model=config, out=folder, precision="mxfp8")
    Trainer(prepare(options, 1), World(0, 1)).save()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a Mixtral whose sizes are multiples of 128, and its weights' folder."""
    from transformers import MixtralConfig

    folder = tmp_path_factory.mktemp("mixtral")
    MixtralConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=2,
        vocab_size=256,
        architectures=["MixtralForCausalLM"],
    ).save_pretrained(folder)
    with mesh_of_one("cpu"):
        _save_step_0(folder / "run", str(folder / "config.json"))
    path = folder / "run" / FOLDER / STEP
    assert export([str(path), str(folder / "master")]) == 0
    return path, load_file(folder / "master" / "model.safetensors")


def _quantized(weight, recipe):
    scaling = RECIPES[recipe]().output.right
    return quantize(weight, scaling, scales_of(amax_of(weight, scaling), scaling))


def _linear_weights(master):
    others = ("lm_head.weight", f"{EXCLUDED}.weight")
    return [name for name in master if "_proj" in name and name not in others]


@pytest.mark.filterwarnings("ignore:torch has no kernel for")
@pytest.mark.parametrize("recipe", ["float8-block", "float8-tensorwise", "mxfp8"])
def test_exported_weights_are_the_quantized_master_weights(recipe, checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM

    path, master = checkpoint
    out = tmp_path / "out"
    options = ["--precision", recipe, "--precision-exclude", EXCLUDE]
    assert export([str(path), str(out), *options]) == 0
    written = load_file(out / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    linear = _linear_weights(master)
    assert len(linear) == 7
    for name, weight in master.items():
        if name not in linear:
            assert torch.equal(written.pop(name), weight), name
            assert name not in loaded or torch.equal(loaded[name], weight), name
            continue
        expected = _quantized(weight, recipe)
        assert torch.equal(written.pop(name).view(torch.uint8), expected.data.view(torch.uint8))
        assert written.pop(f"{name}_scale_inv").numel() == expected.scales.numel()
        assert torch.equal(loaded[name], expected.dequantized()), name
    assert not written
    _assert_transformers_replaces_layers_of(out)


def _assert_transformers_replaces_layers_of(out):
    """On devices with kernels it replaces layers by what config.json says, before it loads."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    config = AutoConfig.from_pretrained(out)
    quantization = FineGrainedFP8Config(**config.quantization_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    skip = quantization.modules_to_not_convert
    replace_with_fp8_linear(model, skip, quantization, pre_quantized=True)
    written = _float8_shapes(load_file(out / "model.safetensors"))
    assert written == _float8_shapes(model.state_dict())


def _float8_shapes(tensors):
    return {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype == torch.float8_e4m3fn or name.endswith("scale_inv")
    }


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--precision", "float8-rowwise"],
            "one of float8-tensorwise, float8-block, mxfp8; give one",
        ),
        (["--precision", "mxfp8", "--precision-exclude", "("], "expected a regular expression"),
        (["--precision-exclude", "x"], "expected --precision with a recipe, got none"),
        (
            ["--precision", "mxfp8", "--precision-exclude", ".*"],
            "--precision mxfp8: ",
        ),
    ],
    ids=["rowwise", "pattern", "none", "no-layer"],
)
def test_what_files_cannot_have_is_one_sentence(checkpoint, options, sentence, tmp_path, capsys):
    path, _ = checkpoint
    assert export([str(path), str(tmp_path / "out"), *options]) == 2
    message = capsys.readouterr().err
    assert "error: " in message
    assert sentence in message
    assert list(tmp_path.iterdir()) == []
