"""Training with --precision: near the losses without, and with one loss in layouts of data."""

import re

import pytest
import torch.distributed as dist

from integration.errors import UsageError
from integration.models import DECODERS, build_model
from integration.systems import SYSTEM_NAMES, get_system
from integration.systems.base import LayerPolicies
from integration.train.config import TrainConfig, parse_config
from integration.train.launch.world import World
from integration.train.model.parallel_model import parallel_model
from integration.train.model.precision import use_precision
from integration.train.setup import prepare
from integration.train.validation import validate
from testkit import run_ranks

pytestmark = [
    # On CPUs these run in plain torch.
    pytest.mark.filterwarnings("ignore:torch has no kernel for"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete"),
]

RECIPES = ("float8-tensorwise", "float8-rowwise", "mxfp8")


def _in_blocks(family, folder):
    """The config.json of a model whose sizes are multiples of 128."""
    from transformers import LlamaConfig, MixtralConfig

    config = {"llama": LlamaConfig, "mixtral": MixtralConfig}[family](
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=256,
        architectures=[f"{family.title()}ForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder / "config.json")


@pytest.mark.ranks
def test_losses_are_near_those_without_and_not_the_same(train_runs, tmp_path):
    small = {"global_batch": 2}
    runs = [small | {"precision": recipe} for recipe in ("none", *RECIPES)]
    exclude = {"precision": "mxfp8", "precision_exclude": r".*\.(mlp|self_attn)\..*"}
    runs.append(small | exclude)
    without, *low, head_only = train_runs(1, runs, out=tmp_path, steps=2)
    for losses in (*low, head_only):
        assert losses == pytest.approx(without, abs=5e-3)  # measured: 8e-4
    assert len({losses[0] for losses in (without, *low, head_only)}) == 5


@pytest.mark.ranks
@pytest.mark.parametrize(
    "recipe",
    [
        "float8-rowwise",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("float8-tensorwise", "mxfp8")),
    ],
)
def test_layouts_of_data_parallelism_have_the_same_losses(recipe, train_runs, tmp_path):
    base = {"system": "plan", "precision": recipe}
    layouts = (
        {"dp_shard": 2},
        {"dp_replicate": 2, "static": True},
        {"dp_shard": 2, "placements": "zero2", "static": True},
    )
    first, *others = train_runs(2, [base | one for one in layouts], out=tmp_path, steps=2)
    assert others == [first, first]


@pytest.mark.ranks
@pytest.mark.slow
def test_tensor_parallel_losses_are_near_those_of_one_device(train_runs, tmp_path):
    """Scales are those of one device; sums over ranks round otherwise."""
    for recipe in RECIPES:
        options = {"precision": recipe, "global_batch": 2}
        (one,) = train_runs(1, [options], out=tmp_path)
        degrees = {"system": "plan", "tp": 2, "sp": True}
        runs = [options | degrees | {"static": static} for static in (False, True)]
        eager, static = train_runs(2, runs, out=tmp_path)
        assert eager == static == pytest.approx(one, abs=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
def test_products_and_policies_have_losses_near_those_of_one_device(train_runs, tmp_path):
    recipe = {"precision": "float8-rowwise"}
    plan = recipe | {"system": "plan"}
    products = (
        {"cp": 2},
        {"dp_shard": 2, "zero3": True},
        {"dp_shard": 2, "activation_checkpointing": "full"},
        {"dp_shard": 2, "compile": "aot_eager"},
        {"tp": 2, "sp": True, "static": True, "compile": "aot_eager"},
        {"model": "mixtral-tiny", "dp_shard": 2, "ep": 2},
    )
    models = [recipe, recipe | {"model": "mixtral-tiny"}]
    llama, mixtral = train_runs(1, models, out=tmp_path / "one", steps=2)
    *dense, experts = train_runs(2, [plan | one for one in products], out=tmp_path / "two", steps=2)
    for losses in dense:
        assert losses == pytest.approx(llama, abs=1e-5)
    assert experts == pytest.approx(mixtral, abs=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float8-block", "float8-tensorwise", "mxfp8"])
def test_every_recipe_has_losses_near_those_of_one_device(recipe, train_runs, tmp_path):
    """By phases, with a sharded sequence, and compiled; float8-rowwise is above."""
    base = {"precision": recipe}
    if recipe == "float8-block":
        base |= {"model": _in_blocks("llama", tmp_path), "sequence_length": 32}
    (one,) = train_runs(1, [base], out=tmp_path / "one", steps=2)
    plan = base | {"system": "plan"}
    runs = [
        plan | {"dp_shard": 2, "zero3": True},
        plan | {"dp_shard": 2, "compile": "aot_eager"},
        plan | {"dp_shard": 2, "activation_checkpointing": "full"},
        plan | {"cp": 2},
    ]
    *data, sequence = train_runs(2, runs, out=tmp_path / "two", steps=2)
    for losses in data:
        assert losses == pytest.approx(one, abs=1e-5)
    assert sequence == pytest.approx(one, abs=1e-3)  # tensorwise scales are of a rank's tokens


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["float8-block", *RECIPES])
def test_pipelines_have_the_losses_of_one_device_that_runs_their_microbatches(
    recipe, train_runs, tmp_path
):
    """Stages of one rank have the bits of one device; scales of tokens are of a microbatch."""
    base = {"precision": recipe, "global_batch": 4}
    if recipe == "float8-block":
        base["model"] = _in_blocks("llama", tmp_path)
    (one,) = train_runs(1, [base | {"micro_batch": 1}], out=tmp_path / "one")
    base |= {"pp_degree": 2}
    runs = [
        base | {"micro_batch": 4, "pp_microbatches": 4, "pp_schedule": schedule, "system": system}
        for schedule in ("1F1B", "ZBVZeroBubble")
        for system in ("single", "plan")
    ]
    assert train_runs(2, runs, out=tmp_path / "two") == [one] * len(runs)
    base |= {"system": "plan", "micro_batch": 2, "pp_microbatches": 2}
    runs = [
        base | {"dp_shard": 2},
        base | {"dp_shard": 2, "static": True, "pp_schedule": "ZBVZeroBubble"},
    ]
    assert train_runs(4, runs, out=tmp_path / "four") == [pytest.approx(one, abs=1e-6)] * 2
    if recipe == "float8-block":
        return  # this model has 128 features
    base |= {"micro_batch": 4, "pp_microbatches": 4, "tp": 2, "sp": True}
    runs = [base, base | {"static": True}]
    eager, static = train_runs(4, runs, out=tmp_path / "tp")
    assert eager == static == pytest.approx(one, abs=1e-3)


@pytest.mark.ranks
@pytest.mark.slow
def test_pipelines_of_experts_have_losses_near_those_of_one_device(train_runs, tmp_path):
    base = {"precision": "float8-rowwise", "global_batch": 4, "model": "mixtral-tiny"}
    (one,) = train_runs(1, [base | {"micro_batch": 1}], out=tmp_path / "one", steps=2)
    base |= {"pp_degree": 2, "micro_batch": 4, "pp_microbatches": 4}
    runs = [base, base | {"system": "plan"}]
    assert train_runs(2, runs, out=tmp_path / "two", steps=2) == [one, one]
    base |= {"system": "plan", "micro_batch": 2, "pp_microbatches": 2, "dp_shard": 2}
    runs = [base, base | {"ep": 2}]
    for losses in train_runs(4, runs, out=tmp_path / "four", steps=2):
        assert losses == pytest.approx(one, abs=1e-3)


def test_blocks_that_do_not_fit_are_refused_before_the_model_changes():
    model = build_model(DECODERS["llama-tiny"], seed=0)
    policies = LayerPolicies(precision="float8-block", precision_exclude="lm_head")
    with pytest.raises(UsageError, match=r"--precision float8-block: .*\(64, 64\); the nearest"):
        use_precision(model, policies, "cpu")
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.ranks
def test_blocks_that_do_not_fit_one_stage_are_refused_on_the_ranks_of_all():
    """The first stage has no layer with the recipe."""

    def check():
        config = TrainConfig(
            model="llama-tiny", system="plan", ranks=2, micro_batch=2, pp_degree=2,
            precision="float8-block", precision_exclude=r"model\.layers\.0\..*|lm_head",
        )  # fmt: skip
        with pytest.raises(UsageError) as raised:
            parallel_model(prepare(config, 2), World(dist.get_rank(), 2))
        return str(raised.value)

    first, second = run_ranks(check, 2)
    assert first == second
    assert re.match(r"--precision float8-block: .*model\.layers\.1\..*; the nearest", first)


def test_compiled_experts_are_refused_unless_they_are_excluded():
    model = build_model(DECODERS["mixtral-tiny"], seed=0)
    compiled = {"precision": "mxfp8", "compile": "aot_eager"}
    with pytest.raises(UsageError, match=r"got model.layers.0.mlp.experts with --compile aot_eag"):
        use_precision(model, LayerPolicies(precision_exclude="lm_head", **compiled), "cpu")
    exclude = r".*experts|lm_head"
    use_precision(model, LayerPolicies(precision_exclude=exclude, **compiled), "cpu")
    quantized = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert len(quantized) == 8  # projections of attention


@pytest.mark.parametrize("system", SYSTEM_NAMES)
def test_systems_without_recipes_are_refused(system):
    ranks = 1 if system == "single" else 2
    config = TrainConfig(
        model="llama-tiny", system=system, ranks=ranks, precision="mxfp8",
        dp_shard=ranks if get_system(system).accepts_degrees else 1,
    )  # fmt: skip
    if get_system(system).supports_precision:
        assert validate(config).system.layer_policies.precision == "mxfp8"
        return
    with pytest.raises(UsageError, match=r"does not support --precision mxfp8; .*single, plan"):
        validate(config)


def test_a_pattern_with_an_error_is_refused():
    with pytest.raises((UsageError, SystemExit)):
        parse_config(["--precision", "mxfp8", "--precision-exclude", "("])


LAYOUTS = {
    "one device": (1, {"micro_batch": 8}),
    # Weights are gathered as operands; Mixtral's experts take the tokens of both ranks.
    "fully_shard": (
        2,
        {"micro_batch": 4, "sequence_length": 32, "system": "plan", "dp_shard": 2},
    ),
}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_hundred_steps_follow_the_curve_of_bfloat16(family, layout, train_runs, tmp_path):
    """The mean loss of every ten steps is within 1e-2 of that of bfloat16, relative to it."""
    ranks, options = LAYOUTS[layout]
    base = {"model": _in_blocks(family, tmp_path), "dtype": "bf16", **options}
    base |= {"learning_rate": 3e-4, "warmup_steps": 10}
    if family == "mixtral" and ranks == 2:
        base["ep"] = 2
    curves = {}
    for recipe in ("none", "float8-block", *RECIPES):
        run = base | {"precision": recipe}
        out = tmp_path / recipe
        (losses,) = train_runs(ranks, [run], out=out, steps=100, timeout=1500)
        curves[recipe] = [sum(losses[step : step + 10]) / 10 for step in range(0, 100, 10)]
    without = curves.pop("none")
    for recipe, curve in curves.items():
        off = [abs(one - other) / other for one, other in zip(curve, without, strict=True)]
        print(
            f"{family}, {layout}, {recipe}: {max(off):.1e}; {without[-1]:.4f} {curve[-1]:.4f}",
            flush=True,
        )
        assert curve == pytest.approx(without, rel=1e-2)
        assert curve != without
