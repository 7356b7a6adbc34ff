"""The linear layers that a plan makes compute in low precision, and the plans that are refused."""

import json

import pytest
from torch import nn
from torch.distributed.tensor import Shard

from plan_api import (
    MXFP8,
    Float8Block,
    Float8Rowwise,
    Float8Tensorwise,
    Plan,
    explain,
    lower,
    parallelize,
)
from testkit import CommLog, fake_mesh

RECIPE = Float8Block("reference", 4)
UP = r"layers\.\d+\.up"


def refused(mesh, model, change, message):
    plan = Plan(mesh)
    change(plan)
    with CommLog() as log, pytest.raises(ValueError, match=message):
        parallelize(model, plan, use=())
    assert log.calls == ()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_pattern_names_linear_layers_among_other_modules(mesh, model):
    lowered = lower(Plan(mesh).precision(r"(?!layers\.1).*", RECIPE), model)
    found = {path: policy.value for path, policy in lowered.precisions.items()}
    paths = ["layers.0.up", "layers.0.down", "layers.2.up", "layers.2.down"]
    assert found == dict.fromkeys(paths, RECIPE)


def test_layers_may_have_different_recipes(mesh, model):
    plan = Plan(mesh).precision(UP, RECIPE).precision("layers.0.down", Float8Rowwise())
    found = lower(plan, model).precisions
    assert found["layers.0.up"].value == RECIPE
    assert found["layers.0.down"].value == Float8Rowwise()


@pytest.mark.parametrize(
    "recipe",
    [Float8Tensorwise(), Float8Rowwise("kernel"), Float8Block("reference", 32), MXFP8("auto")],
    ids=str,
)
def test_json_has_the_recipe(mesh, recipe):
    plan = Plan(mesh).precision(UP, recipe)
    again = Plan.from_json(plan.to_json(), mesh)
    assert again.entries == plan.entries
    assert dict(again.entries[0].options) == {"recipe": recipe}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("float8-blok", "expected 'float8-tensorwise' or.*got 'float8-blok'; did you mean 'float8"),
        ({"recipe": "mxfp8", "block": 16}, "recipe 'mxfp8': expected the fields products, got 'bl"),
        (
            {"recipe": "mxfp8", "products": "all"},
            "products: expected 'auto', 'kernel', 'reference'",
        ),
        ({"recipe": "float8-block", "block": 0}, "block: expected a number of elements.*got 0"),
    ],
)
def test_json_with_something_else_is_refused(mesh, change, message):
    text = Plan(mesh).precision(UP, MXFP8()).to_json()
    text = text.replace('{\n     "recipe": "mxfp8"\n    }', json.dumps(change))
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text, mesh)


def test_explain_has_a_row_for_each_layer(mesh, model):
    rows = explain(Plan(mesh).precision(UP, RECIPE), model).rows
    (row, *others) = [row for row in rows if row.hook == "precision"]
    assert (row.site, row.after) == ("layers.0.up", "float8-block, products=reference, block=4")
    assert row.line.startswith("test_precision.py:")
    assert len(others) == 2


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: plan.precision("layer.0.up", RECIPE),
            r"precision.*: no module has this name; did you mean 'layers.0.up'",
        ),
        (
            lambda plan: plan.precision("layers.0", RECIPE),
            r"test_precision.py:\d+: precision\('layers.0'.*: expected linear layers or experts, "
            r"such as layers.0.up, got layers.0, a Block",
        ),
        (
            lambda plan: plan.precision("", RECIPE),
            "expected linear layers or experts.*got the model, a Model",
        ),
        (
            lambda plan: plan.precision(UP, RECIPE).precision("layers.0.up", MXFP8()),
            "expected one recipe for layers.0.up, got another: test_precision.py",
        ),
        (
            lambda plan: plan.precision("layers.0.up", Float8Block("reference", 3)),
            r"out_features of layers.0.up in blocks of 3, got a weight of shape \(8, 4\); the "
            r"nearest that fits is out_features=6 or 9",
        ),
        (
            lambda plan: plan.precision("layers.0.up", MXFP8("reference")),
            "blocks of 32, got .*; the nearest that fits is out_features=32",
        ),
        (
            lambda plan: plan.precision("layers.0.down", Float8Block("reference", 8)),
            "out_features of layers.0.down in blocks of 8, got .*out_features=8",
        ),
        (
            lambda plan: plan.precision("layers.0.up", Float8Block("kernel", 4)),
            "test_precision.py.*: expected a device with kernels of torch for float8-block",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(mesh, model, change, message):
    refused(mesh, model, change, message)


def test_what_is_no_recipe_and_no_module_is_refused(mesh):
    with pytest.raises(ValueError, match=r"recipe: expected one of Float8Tensorwise.*got 'mxfp8'"):
        Plan(mesh).precision("layers.0.up", "mxfp8")
    with pytest.raises(ValueError, match="module"):
        Plan(mesh).precision("layers.0.<out>", RECIPE)


def test_a_shard_that_cuts_a_block_is_refused(mesh, model):
    def change(plan):
        plan.shard(r"layers\.\d+\.down\.weight", Shard(1), "tp")
        plan.precision("layers.0.down", Float8Block("reference", 4))

    lower_to = Plan(mesh)
    change(lower_to)
    lower(lower_to, model)  # 8 features are 4 on each of 2 ranks

    refused(
        mesh,
        nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"down": nn.Linear(12, 4)})])}),
        change,
        r"in_features of layers.0.down in blocks of 4 on each of 2 ranks that shard them, got a "
        r"weight of shape \(4, 12\); the nearest that fits is in_features=8 or 16",
    )


def test_a_fused_projection_whose_parts_cut_a_block_is_refused(mesh):
    from ragged_shard import InterleavedShard

    def change(plan):
        plan.shard("0.weight", InterleavedShard(0, 3), "tp")
        plan.precision("0", Float8Block("reference", 4))

    model = nn.Sequential(nn.Linear(8, 12, bias=False))
    refused(mesh, model, change, "out_features of 0 in blocks of 4 on each of 6 ranks")


def test_a_linear_layer_with_its_own_forward_is_no_linear_layer(mesh):
    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    assert list(lower(Plan(mesh).precision(".*", RECIPE), model).precisions) == ["1"]


@pytest.mark.parametrize(
    "recipe", [Float8Block("reference", 4), Float8Tensorwise(), Float8Rowwise()], ids=str
)
def test_sharded_weights_are_operands_where_ranks_have_equal_parts(model, recipe):
    for ranks, expected in ((2, {"layers.1.up.weight", "layers.1.down.weight"}), (3, set())):
        if ranks == 3 and recipe.feature_block > 1:
            continue  # refused: a rank has no whole blocks
        with fake_mesh((2, ranks), ("dp", "tp")) as mesh:
            plan = Plan(mesh).precision(r"layers\.1\.(up|down)", recipe)
            plan.shard(r"layers\.1\.up\..*", Shard(0), "tp")
            plan.shard(r"layers\.1\.down\.weight", Shard(1), "tp")
            values = lower(plan.fully_shard("", "dp"), model).shard_values
        assert {name for name, one in values.items() if one.operand == recipe} == expected
