"""Plans as tables and as JSON, and their differences."""

import json
import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Phase, Plan, diff, explain
from testkit import fake_mesh

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def plan_of(mesh):
    return (
        Plan(mesh)
        .shard(r"layers\.0\.up\.(weight|bias)", S0, "tp")
        .shard("layers.0.<in>", R, "tp")
        .shard("layers.0.<in>", S0, "dp")
        .redistribute("layers.0.<out>", P, S1, "tp", grad_dst=R)
        .shard("layers.0.up.bias", R, "tp")
    )


# The table of `plan_of`, with ? for the lines of this file.
TABLE = """\
site         hook         tensor   before  after          gradient  bytes  line
layers.0     forward_pre  <in>:0           dp=S(0), tp=R                   ?, ?
layers.0     forward      <out>:0  tp=P    tp=S(1)        tp=?->R          ?
layers.0.up  init         bias             tp=R                     32     ?
layers.0.up  init         weight           tp=S(0)                  64     ?
layers.0.up.init:bias:0:shard(->S(0), tp) is overridden by \
layers.0.up.init:bias:0:shard(->R, tp)"""


def test_the_table_has_a_row_for_each_tensor_at_each_site(mesh, model):
    text = str(explain(plan_of(mesh), model))
    assert re.sub(r"test_explain\.py:\d+", "?", text) == TABLE


def test_rich_prints_the_same_rows(mesh, model, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    explanation = plan_of(mesh).explain(model)
    assert explanation == explain(plan_of(mesh), model)
    drawn = capsys.readouterr().out
    assert "forward_pre" in drawn
    assert "overridden" in drawn
    assert explanation.table().row_count == len(explanation.rows)


def test_a_table_is_not_truncated_without_a_terminal(mesh, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    inner = nn.Module()
    inner.a_projection_with_quite_a_long_name = nn.Linear(4, 4)
    model = nn.ModuleDict({"a_block_with_a_name_that_fills_a_line_of_a_narrow_terminal": inner})
    plan = Plan(mesh).shard(r".*long_name\.weight", S0, "tp")
    found = plan.explain(model)
    drawn = capsys.readouterr().out
    assert found.rows[0].site in drawn
    assert found.rows[0].line in drawn


def test_a_plan_is_serialized_and_read_again(mesh, model):
    plan = Plan(mesh, cover=True) | plan_of(mesh) | plan_of(mesh).under("encoder.1")
    plan.annotate("<in>", Partial("avg"), "dp").shard("w", S0, "dp", Phase.RUN)
    text = plan.to_json()
    again = Plan.from_json(text, mesh)
    assert again.entries == plan.entries
    assert [one.line for one in again.entries] == [one.line for one in plan.entries]
    assert again.cover
    assert again.to_json() == text
    assert json.loads(text)["mesh"] == {"dp": 2, "tp": 2}


def test_placements_of_other_packages_are_serialized(mesh):
    ragged = pytest.importorskip("ragged_shard", reason="an extra of plan-api")
    plan = Plan(mesh).shard("w", ragged.InterleavedShard(0, 3), "tp")
    plan.shard("v", ragged.RaggedShard((0,), (1, 2)), "tp")
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries


def test_policies_are_serialized_and_printed_by_what_differs_from_the_default(mesh):
    plan = Plan(mesh).fully_shard(
        "a", "dp", mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    )
    plan.fully_shard("", "dp", offload_policy=CPUOffloadPolicy())
    again = Plan.from_json(plan.to_json(), mesh)
    assert again.entries == plan.entries
    assert "param_dtype=torch.bfloat16, cast_forward_inputs=False)" in str(again.entries[0])
    assert "CPUOffloadPolicy()" in str(again.entries[1])
    policy = dict(again.entries[0].options)["mp_policy"].make()
    assert policy == MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)
    unknown = plan.to_json().replace('"param_dtype"', '"weights"')
    with pytest.raises(ValueError, match=r"mp_policy: expected a policy such as .* got .*weigh"):
        Plan.from_json(unknown, mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": torch.bfloat16}, "mp_policy: expected MixedPrecisionPolicy of torch, got"),
        ({"offload_policy": True}, "expected OffloadPolicy or CPUOffloadPolicy of torch, got T"),
        (
            {"mp_policy": MixedPrecisionPolicy(lambda param: torch.bfloat16)},
            r"fully_shard\('a'\): mp_policy: expected dtypes, numbers .* got param_dtype=<func",
        ),
    ],
)
def test_policies_that_a_plan_cannot_store_are_refused(mesh, options, message):
    with pytest.raises(ValueError, match=message):
        Plan(mesh).fully_shard("a", "dp", **options)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"version": 1', '"version": 7', "a plan of version 1"),
        ('"S(0)"', '"Q(0)"', r"shard\(.*\): expected a placement .* got 'Q\(0\)'"),
        ('"tp"\n', '"ep"\n', r"axes \('dp', 'tp'\), not 'ep'"),
        ('"S(0)"', '{"type": "torch.nn:Linear"}', "class of placements, got torch.nn.Linear"),
    ],
)
def test_invalid_json_is_refused(mesh, old, new, message):
    text = plan_of(mesh).to_json()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text.replace(old, new, 1), mesh)


def test_a_plan_fits_a_mesh_of_another_size(mesh, model):
    text = plan_of(mesh).to_json()
    import torch.distributed as dist

    dist.destroy_process_group()
    with fake_mesh((4, 8), ("dp", "tp")) as large:
        rows = explain(Plan.from_json(text, large), model).rows
        assert [row.bytes for row in rows] == ["", "", "32", "16"]


def test_diff_ignores_source_lines(mesh):
    other = Plan(mesh).shard("layers.0.<in>", R, "tp").shard("more", S0, "dp")
    found = diff(plan_of(mesh), other)
    assert [entry.path.text for entry in found.added] == ["more"]
    assert len(found.removed) == 4
    assert str(found).splitlines()[-1].startswith("+ shard('more', dp=")
    assert str(diff(other, other)) == ""


def test_bytes_of_phases_count_all_axes(mesh, model):
    """A weight of 8 x 4 numbers: a half of it on tp at all times, and of that a half on dp."""
    plan = Plan(mesh)
    for weight, phase in (("up", Phase.OPTIM), ("down", Phase.INIT)):
        path = rf"layers\.1\.{weight}\.weight"
        plan.shard(path, S0, "tp").shard(path, S0, "dp", phase)
    plan.shard(r"layers\.1\.down\.weight", R, "dp", Phase.RUN)
    rows = {(row.site, row.hook): row.bytes for row in explain(plan, model).rows}
    assert rows == {
        ("layers.1.up", "init"): "64",
        ("layers.1.up", "optim"): "32",
        ("layers.1.down", "init"): "32",
        ("layers.1.down", "run"): "64",
    }
