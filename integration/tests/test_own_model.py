"""``--model`` of a config.json or a function, and ``--plan``: trained, and what is refused."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import integration.data
from integration.errors import UsageError
from integration.models import LlamaShape, MixtralShape, build_model, model_shape, shape_from
from integration.sampling import main as sample
from integration.train.checkpoint.checkpoint import FOLDER
from integration.train.config import TrainConfig
from integration.train.validation import validate
from testkit import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = Path(integration.data.__file__).parent
ROPE = {"rope_type": "default", "rope_theta": 777.0}
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256,
}  # fmt: skip


def written(config, path):
    config.save_pretrained(path)
    return path / "config.json"


def test_a_config_is_built_with_all_of_its_entries(tmp_path):
    config = LlamaConfig(
        **SIZES, rms_norm_eps=1e-3, max_position_embeddings=99, tie_word_embeddings=True,
        rope_parameters=ROPE, pad_token_id=5,
    )  # fmt: skip
    shape = model_shape(str(written(config, tmp_path)))
    assert isinstance(shape, LlamaShape)
    built = build_model(shape, seed=0).config
    # The trainer decides these.
    own = ("use_cache", "_attn_implementation_internal", "dtype", "architectures")
    expected, found = (
        {k: v for k, v in each.to_dict().items() if k not in own} for each in (config, built)
    )
    assert found == expected
    assert built.use_cache is False
    assert shape_from(json.loads(json.dumps(asdict(shape)))) == shape


ATTENTION = {"head_dim": 16, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
FAMILIES = {
    "qwen3": Qwen3Config(**SIZES | ATTENTION, rope_parameters=ROPE),
    "gemma3": Gemma3TextConfig(**SIZES | ATTENTION, sliding_window=9, query_pre_attn_scalar=7),
    "qwen3_moe": Qwen3MoeConfig(**SIZES | ATTENTION | EXPERTS, num_experts=6, norm_topk_prob=False),
    "gpt_oss": GptOssConfig(**SIZES | ATTENTION, num_local_experts=4, sliding_window=9),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | EXPERTS | LATENT, n_routed_experts=4, n_group=2, topk_group=1,
        first_k_dense_replace=1, routed_scaling_factor=1.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_the_zoo_is_built_as_its_file_says(family, tmp_path):
    shape = model_shape(str(written(FAMILIES[family], tmp_path)))
    assert shape.family == family
    built = build_model(shape, seed=0).config
    own = ("use_cache", "_attn_implementation_internal", "dtype", "architectures")
    expected, found = (
        {k: v for k, v in each.to_dict().items() if k not in own}
        for each in (FAMILIES[family], built)
    )
    assert found == expected
    assert shape_from(json.loads(json.dumps(asdict(shape)))) == shape


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_the_zoo_trains_as_one_device(family, train_runs, tmp_path):
    run = {"model": str(written(FAMILIES[family], tmp_path)), "micro_batch": 4}
    (expected,) = train_runs(1, [run], out=tmp_path / "one", steps=4)
    plan = run | {"system": "plan"}
    products = [plan | {"tp": 2}, plan | {"dp_shard": 2, "static": True}]
    for losses in train_runs(2, products, out=tmp_path / "two", steps=4):
        assert losses == pytest.approx(expected, rel=0, abs=6e-5)


@pytest.mark.parametrize("changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_are_refused(changes, tmp_path):
    config = Qwen3MoeConfig(**SIZES | ATTENTION | EXPERTS | changes, num_experts=6)
    with pytest.raises(UsageError, match="expected experts in all layers, got mlp_only_layers"):
        model_shape(str(written(config, tmp_path)))


def test_a_mixtral_has_the_window_of_its_file(tmp_path):
    config = MixtralConfig(**SIZES, num_local_experts=3, sliding_window=7)
    shape = model_shape(str(written(config, tmp_path)))
    assert isinstance(shape, MixtralShape)
    assert shape.num_local_experts == 3
    assert build_model(shape, seed=0).config.sliding_window == 7
    assert shape_from(asdict(shape)) == shape


def test_what_a_file_leaves_out_has_the_defaults_of_the_class(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    shape = model_shape(str(path))
    assert (shape.num_hidden_layers, shape.hidden_size) == (3, LlamaConfig().hidden_size)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_type": "gpt2"}, "expected model_type llama, qwen3, .*, got 'gpt2'"),
        (
            {"model_type": "llama", "attention_dropout": 0.1},
            "expected attention_dropout 0, got 0.1",
        ),
        ({}, "expected a config.json of Hugging Face"),
        ([], "expected a config.json of Hugging Face"),
    ],
    ids=["family", "dropout", "empty", "list"],
)
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(model=str(path)))


def test_names_that_are_no_model_are_refused(tmp_path):
    for name, message in (
        (str(tmp_path / "none.json"), r"none\.json: expected a config\.json"),
        ("llama-7b", r"unknown model 'llama-7b'; choose one of: llama-10m"),
        ("nowhere:model", r"--model nowhere:model: expected package\.module:function"),
        ("json:nothing", r"--model json:nothing: expected package\.module:function"),
        ("json:__name__", r"expected a function, got a str"),
        ("collections:OrderedDict", r"return an integration\.models\.ModelShape, got a OrderedD"),
    ):
        with pytest.raises(UsageError, match=message):
            validate(TrainConfig(model=name))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path):
    path = str(written(LlamaConfig(**SIZES), tmp_path))
    assert validate(TrainConfig(model=path)).shape.vocab_size == 256
    with pytest.raises(UsageError, match=r"--tokenizer: .* vocab_size = 256 tokens, got 300"):
        validate(TrainConfig(model=path, tokenizer="bpe:300"))
    larger = str(written(LlamaConfig(**SIZES | {"vocab_size": 320}), tmp_path / "larger"))
    assert validate(TrainConfig(model=larger, tokenizer="bpe:300")).shape.vocab_size == 320


@pytest.mark.ranks
def test_a_config_trains_as_the_named_model_of_its_sizes_and_is_sampled(train_runs, tmp_path):
    config = LlamaConfig(**SIZES, max_position_embeddings=2048)
    run = {"data": TEXT, "model": str(written(config, tmp_path)), "save_at": 2}
    named, (found,) = (
        train_runs(1, [{"data": TEXT}], out=tmp_path / "named")[0],
        train_runs(2, [run | {"system": "plan", "tp": 2, "out": tmp_path / "run"}], out=tmp_path),
    )
    assert found == pytest.approx(named, rel=0, abs=1e-5)
    path = tmp_path / "run" / FOLDER / "step-00000002"
    assert sample([str(path), "--max-tokens", "3"]) == 0


ROUTER_LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.ranks
@pytest.mark.slow
def test_the_loss_of_a_mixtrals_routers_is_that_of_one_device(train_runs, tmp_path):
    model = str(written(MixtralConfig(**SIZES, num_local_experts=4, **ROUTER_LOSS), tmp_path))
    without = str(written(MixtralConfig(**SIZES, num_local_experts=4), tmp_path / "without"))
    run = {"data": TEXT, "model": model, "micro_batch": 8}
    plan = run | {"system": "plan"}
    products = [
        plan | {"dp_shard": 2, "ep": 2, "micro_batch": 4},
        plan | {"dp_replicate": 2, "static": True, "micro_batch": 4},
        plan | {"tp": 2, "sp": True, "ep": 2, "activation_checkpointing": "full"},
    ]
    expected, other = train_runs(1, [run, run | {"model": without}], out=tmp_path / "one")
    assert expected[0] - other[0] > 0.9  # at least the coefficient times two choices
    for found in train_runs(2, products, out=tmp_path / "two"):
        assert found == pytest.approx(expected, rel=0, abs=6e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "fsdp2", "ranks": 2}, "expected --system plan, or single, got fsdp2"),
        ({"compile": "aot_eager"}, "expected --compile none, got aot_eager"),
        ({"system": "plan", "pp_degree": 2, "ranks": 2}, "output_router_logits = True adds a loss"),
    ],
    ids=["system", "compile", "pipeline"],
)
def test_where_routers_have_no_loss_of_all_tokens_it_is_refused(options, message, tmp_path):
    model = str(written(MixtralConfig(**SIZES, **ROUTER_LOSS), tmp_path))
    with pytest.raises(UsageError, match=message):
        validate(TrainConfig(model=model, **options))


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    sys.modules.pop("own_model", None)


PRODUCTS = {
    "fsdp": {"system": "fsdp"},
    "DP": {"system": "plan", "plan": "own_model:plan", "dp_replicate": 2},
    "TP": {"system": "plan", "plan": "own_model:plan", "tp": 2},
}


def _train_own(runs):
    sys.path.insert(0, str(EXAMPLES))
    import torch.distributed as dist

    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.session import restore_torch
    from integration.train.setup import prepare

    world, found = World(dist.get_rank(), dist.get_world_size()), []
    for options in runs:
        restore_torch()
        config = TrainConfig(micro_batch=2, steps=4, resume="never", **options)
        trainer, losses = Trainer(prepare(config, world.size), world), []
        for _ in range(4):
            loss = trainer.train_step()
            dist.all_reduce(loss)
            losses.append(loss.item() / world.size)
        found.append(losses)
        del trainer, loss  # before torch is restored
    return found


@pytest.mark.ranks
def test_a_model_and_a_plan_of_ones_own_train_as_on_one_device(tmp_path):
    own = {"data": TEXT, "model": "own_model:model", "out": tmp_path}
    ((expected,),) = run_ranks(_train_own, 1, [own])
    assert expected[0] - expected[-1] > 0.1
    found = run_ranks(_train_own, 2, [own | product for product in PRODUCTS.values()])[0]
    for name, losses in zip(PRODUCTS, found, strict=True):
        assert losses == pytest.approx(expected, rel=0, abs=1e-5), name


def test_a_model_of_ones_own_needs_a_plan_of_ones_own(examples):
    run = {"model": "own_model:model", "system": "plan", "tp": 2, "ranks": 2}
    with pytest.raises(UsageError, match=r"zoo has plans, got a own; give --plan package\.mod"):
        validate(TrainConfig(**run))
    validate(TrainConfig(**run, plan="own_model:plan"))
    with pytest.raises(UsageError, match=r"--plan own_model:plan: expected --system plan"):
        validate(TrainConfig(model="own_model:model", plan="own_model:plan"))
    with pytest.raises(UsageError, match=r"--plan own_model:plan: expected --pp-degree 1"):
        validate(TrainConfig(plan="own_model:plan", system="plan", pp_degree=2, ranks=2))
    with pytest.raises(UsageError, match=r"--plan own_model:nothing: expected package"):
        validate(TrainConfig(**run, plan="own_model:nothing"))


def _train_with_plan(options, make):
    import torch.distributed as dist

    import integration.systems.plan as plan_system
    from integration.train.launch.world import World
    from integration.train.loop import Trainer
    from integration.train.setup import prepare

    world = World(dist.get_rank(), dist.get_world_size())
    plan_system.PlanSystem.make_plan = staticmethod(make)
    try:
        Trainer(prepare(TrainConfig(**options), world.size), world)
    except UsageError as error:
        return str(error)
    finally:
        plan_system.PlanSystem.make_plan = None


def _no_plan(mesh, shape, degrees):
    return "plan"


def _misspelled(mesh, shape, degrees):
    from torch.distributed.tensor import Shard

    from plan_api import Plan

    return Plan(mesh).shard("nowhere.weight", Shard(0), "tp")


@pytest.mark.ranks
def test_what_is_no_plan_of_the_model_is_one_error(tmp_path):
    run = {"model": "llama-tiny", "system": "plan", "tp": 2, "out": tmp_path, "data": TEXT}
    for error in run_ranks(_train_with_plan, 2, run, _no_plan):
        assert error == (
            "--plan: expected the function to return a plan_api.Plan, got a str; return one"
        )
    for error in run_ranks(_train_with_plan, 2, run, _misspelled):
        assert error.startswith("--plan: the plan does not fit the model")
