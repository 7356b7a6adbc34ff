"""The modules that a plan recomputes and compiles, and the plans that are refused."""

import pytest
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from plan_api import Phase, Plan, explain, lower, parallelize, zoo
from testkit import CommLog, models

R, S0 = Replicate(), Shard(0)
LAYER, POLICY = r"layers\.\d+", "keep-dispatch"


def refused(mesh, model, change, message):
    plan = Plan(mesh)
    change(plan)
    with CommLog() as log, pytest.raises(ValueError, match=message):
        parallelize(model, plan, use=())
    assert log.calls == ()
    assert not any("forward" in vars(module) for module in model.modules())


def test_modules_have_their_policies_by_path(mesh, model):
    plan = Plan(mesh).recompute(r"layers\.[01]").recompute("layers.2", "selective-op")
    lowered = lower(plan.compile(r"layers\.[01]\.up", "eager"), model)
    found = {path: policy.value for path, policy in lowered.recomputed.items()}
    assert found == {"layers.0": "full", "layers.1": "full", "layers.2": "selective-op"}
    assert list(lowered.compiled) == ["layers.0.up", "layers.1.up"]


def test_an_entry_may_be_repeated(mesh, model):
    plan = Plan(mesh).recompute(LAYER)
    assert lower(plan | plan, model).recomputed.keys() == lower(plan, model).recomputed.keys()


def test_a_module_with_two_names_has_one_policy(mesh, model):
    model.alias = model.layers[1]
    assert list(lower(Plan(mesh).recompute("alias"), model).recomputed) == ["layers.1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: plan.recompute(r"layer\.0"),
            r"test_policies.py:\d+: recompute.*: no module has this name; did you mean 'layers.0'",
        ),
        (
            lambda plan: plan.recompute(LAYER).recompute("layers.1", "selective-op"),
            r"test_policies.py:\d+: recompute\('layers.1', policy='selective-op'\): expected one "
            r"recompute\(\) entry for layers.1, got another: test_policies.py:\d+: recompute",
        ),
        (
            lambda plan: plan.recompute("layers.0").recompute(r"layers\.0\.up"),
            r"layers\\\\.0\\\\.up.*got layers.0.up, which is inside of layers.0: "
            r"test_policies.py:\d+: recompute\('layers.0'",
        ),
        (
            lambda plan: plan.recompute("").recompute("layers.0"),
            "layers.0, which is inside of the model",
        ),
        (
            lambda plan: plan.recompute("layers"),
            r"expected modules with a forward, got layers, a ModuleList.*as in r\"layers\\.\\d\+\"",
        ),
        (
            lambda plan: plan.compile(r"layer\.0", "eager"),
            r"test_policies.py:\d+: compile.*: no module has this name",
        ),
        (
            lambda plan: plan.compile(LAYER, "eager").compile("layers.1", "aot_eager"),
            r"expected one compile\(\) entry for layers.1",
        ),
        (
            lambda plan: plan.compile("layers.0", "eager").compile("layers.0.up", "eager"),
            "layers.0.up, which is inside of layers.0",
        ),
        (
            lambda plan: plan.compile("layers.0.up", "eager").recompute("layers.0", "selective-op"),
            r"whose operators the recomputation of layers.0 has to see: test_policies.py",
        ),
        (
            lambda plan: plan.compile("layers.0", "eager").annotate("layers.0.<op:relu>", S0, "tp"),
            r"got layers.0, whose own calls of functions the plan places: test_policies.py.*relu",
        ),
    ],
    ids=[
        "no module", "two policies", "inside", "inside of the model", "a list",
        "no module to compile", "two backends", "compiled inside of compiled",
        "compiled inside of recomputed", "operators",
    ],
)  # fmt: skip
def test_policies_that_overlap_or_name_nothing_are_refused(mesh, model, change, message):
    refused(mesh, model, change, message)


def _gathered_for_backward(plan):
    return plan.shard(r"layers\.\d+\.up\.weight", S0, "dp").shard(
        r"layers\.\d+\.up\.weight", R, "dp", Phase.RUN
    )


def test_a_selective_policy_is_refused_for_parameters_that_are_gathered_again(mesh, model):
    refused(
        mesh, model,
        lambda plan: _gathered_for_backward(plan).recompute(LAYER, "selective-op"),
        r"recompute\(.*got layers.0.up.weight, which is gathered again there, as "
        r"test_policies.py:\d+ says; use recompute\(r\"layers",
    )  # fmt: skip
    lower(_gathered_for_backward(Plan(mesh)).recompute(LAYER), model)
    lower(_gathered_for_backward(Plan(mesh)).recompute(r".*\.down", "selective-op"), model)


def test_rows_are_kept_only_where_modules_inside_dispatch_tokens(mesh):
    for_all = {"tp": None, "dp": ("dp", "tp")}
    plans = {
        "nothing is dispatched": zoo.mixtral(mesh, **for_all),
        "the module itself does": zoo.mixtral(mesh, **for_all, ep="dp"),
    }
    model, dispatches = models.mixtral(), "expected modules inside of which tokens are dispatched"
    for plan, path, got in (
        (plans["nothing is dispatched"], r"model\.layers\.\d+", r"model\.layers\.0"),
        (plans["the module itself does"], r".*\.experts", r"model\.layers\.0\.mlp\.experts"),
    ):
        message = rf"test_policies.py:\d+: recompute\(.*{POLICY}'\): {dispatches}, got {got}, where"
        with pytest.raises(ValueError, match=message):
            lower(plan.recompute(path, POLICY), model)
    plan = zoo.mixtral(mesh, **for_all, ep="dp").recompute(r"model\.layers\.\d+", POLICY)
    recomputed = lower(plan, model).recomputed
    assert {one.value for one in recomputed.values()} == {POLICY}
    rows = [row for row in explain(plan, model).rows if row.hook == "recompute"]
    assert [row.after for row in rows] == [POLICY] * 2
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries


def test_parameters_that_stay_gathered_take_a_selective_policy(mesh, model):
    plan = Plan(mesh).shard(r".*\.weight", S0, "dp", Phase.OPTIM)
    lower(plan.recompute(LAYER, "selective-op"), model)


def test_modules_in_which_parameters_are_gathered_are_not_compiled(mesh, model):
    refused(
        mesh, model,
        lambda plan: _gathered_for_backward(plan).compile(LAYER, "eager"),
        r"compile\(.*got layers.0, in which layers.0.up.weight is gathered, as test_policies",
    )  # fmt: skip
    lower(_gathered_for_backward(Plan(mesh)).compile(r".*\.(up|down)", "eager"), model)


def test_modules_that_contain_fully_sharded_ones_are_not_compiled(mesh, model):
    pytest.importorskip("fsdp", reason="offers fully_shard")
    refused(
        mesh, model,
        lambda plan: plan.fully_shard("layers.0.up", "dp").compile("layers.0", "eager"),
        "in which fully_shard gathers layers.0.up: test_policies.py",
    )  # fmt: skip
    lower(Plan(mesh).fully_shard(LAYER, "dp").compile(LAYER, "eager"), model)


def test_attention_over_a_sharded_sequence_is_not_compiled(mesh):
    model = models.llama(num_hidden_layers=1, attn_implementation="sdpa")

    def change(plan):
        plan.context(r"model\.layers\.\d+\.self_attn", "tp")
        plan.compile(r"model\.layers\.\d+", "eager")

    refused(mesh, model, change, "in which model.layers.0.self_attn sends keys and values: test_")


def test_stages_have_the_entries_of_their_modules(mesh, model):
    stage = nn.Module()
    stage.layers = nn.ModuleDict({"1": model.layers[1]})
    stage.forward = lambda x: stage.layers["1"](x)
    plan = Plan(mesh).recompute(r"layers\.[01]").compile("layers.0", "eager")
    lowered = lower(plan.for_stage(stage, model, last=False), stage)
    assert list(lowered.recomputed) == ["layers.1"]
    assert not lowered.compiled


def test_dispatched_tokens_are_not_compiled(mesh):
    model = models.mixtral(num_hidden_layers=1)
    plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp").compile(r"model\.layers\.\d+", "eager")
    with pytest.raises(ValueError, match=r"mlp.experts sends numbers of tokens .*: test_policies"):
        lower(plan, model)
    lower(zoo.mixtral(mesh, ep="tp").compile(r"model\.layers\.\d+", "eager"), model)
