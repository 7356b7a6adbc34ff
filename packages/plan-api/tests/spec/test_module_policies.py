"""Entries that recompute and compile modules: their values, as text, JSON and rows of a table."""

import json

import pytest
from torch.distributed.tensor import Shard

from plan_api import Plan, diff, explain


def policies(mesh):
    return Plan(mesh).recompute(r"layers\.[01]", "selective-op").compile(r"layers\.\d+", "eager")


def test_entries_print_their_values_and_lines(mesh):
    plan = policies(mesh).recompute("layers.2")
    assert str(plan).splitlines() == [
        r"recompute('layers\\.[01]', policy='selective-op')",
        r"compile('layers\\.\\d+', backend='eager')",
        "recompute('layers.2', policy='full')",
    ]
    assert all(entry.line.startswith("test_module_policies.py:") for entry in plan.entries)


def test_inductor_compiles_by_default(mesh):
    (entry,) = Plan(mesh).compile("layers.0").entries
    assert dict(entry.options) == {"backend": "inductor"}


def test_entries_are_serialized_nested_and_joined(mesh):
    plan = policies(mesh).under("model") | Plan(mesh).compile("head", "eager")
    again = Plan.from_json(plan.to_json(), mesh)
    assert again.entries == plan.entries
    assert again.to_json() == plan.to_json()
    assert again.entries[0].path.matches("model.layers.1")
    assert not diff(plan, again).added
    rows = json.loads(plan.to_json())["entries"]
    assert [row["options"] for row in rows] == [
        {"policy": "selective-op"}, {"backend": "eager"}, {"backend": "eager"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda plan: plan.recompute("layers.0", "selective_op"),
            r"recompute\('layers.0'\): policy: expected 'full' or 'selective-op' or "
            r"'keep-dispatch', got "
            r"'selective_op'; did you mean 'selective-op'\?",
        ),
        (lambda plan: plan.recompute("layers.0", None), "policy: expected 'full' .* got None"),
        (lambda plan: plan.recompute("layers.0.<in>"), r"has to name modules"),
        (
            lambda plan: plan.compile("layers.0", "inducter"),
            r"compile\('layers.0'\): backend: expected .*'aot_eager'.*, got 'inducter'; did you "
            r"mean 'inductor'\?",
        ),
        (
            lambda plan: plan.compile("layers.0", lambda graph, inputs: graph),
            "backend: expected the name of a backend .*register it by",
        ),
        (lambda plan: plan.compile("layers.0.<out>", "eager"), "has to name modules"),
    ],
)
def test_other_values_are_refused_by_the_methods(mesh, call, message):
    plan = Plan(mesh)
    with pytest.raises(ValueError, match=message):
        call(plan)
    assert plan.entries == ()


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        (0, {"policy": "ful"}, "did you mean 'full'"),
        (0, {}, "expected 'policy', got none"),
        (1, {"backend": "nothing"}, "backend: expected .*got 'nothing'"),
        (1, {"backend": "eager", "fullgraph": False}, "expected 'backend', got 'fullgraph'"),
    ],
)
def test_other_values_are_refused_in_json(mesh, entry, options, message):
    found = json.loads(policies(mesh).to_json())
    found["entries"][entry]["options"] = options
    with pytest.raises(ValueError, match=message):
        Plan.from_json(json.dumps(found), mesh)


def test_the_table_has_a_row_for_each_module(mesh, model):
    plan = policies(mesh).shard(r"layers\.0\.up\.weight", Shard(0), "tp")
    rows = explain(plan, model).rows
    assert [(row.site, row.hook, row.after) for row in rows] == [
        ("layers.0", "recompute", "selective-op"),
        ("layers.0", "compile", "eager"),
        ("layers.0.up", "init", "tp=S(0)"),
        ("layers.1", "recompute", "selective-op"),
        ("layers.1", "compile", "eager"),
        ("layers.2", "compile", "eager"),
    ]
    assert rows[0].line == plan.entries[0].line


def test_the_table_has_a_row_for_fully_shard(mesh, model):
    pytest.importorskip("fsdp", reason="offers fully_shard")
    plan = Plan(mesh).fully_shard("layers.0", "dp", reshard_after_forward=False)
    (row,) = explain(plan, model).rows
    assert (row.hook, row.after) == ("fully_shard", "over dp, reshard_after_forward=False")
