"""The line of an entry: the user's own, or the user's call and the line of the plan it begins."""

import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import plan_api
from plan_api import Plan, explain, parallelize, track, zoo
from testkit import fake_mesh, models

HERE = Path(__file__).name


def here():
    """The line that calls this."""
    return f"{HERE}:{sys._getframe(1).f_lineno}"


def source(line):
    """The text of the line of this package that is named behind a user's."""
    name, number = line.split(" > ")[1].split(":")
    return (Path(plan_api.__file__).parent / name).read_text().splitlines()[int(number) - 1]


def test_a_users_entry_has_the_line_of_the_user(mesh):
    plan, line = Plan(mesh).shard("w", Shard(0), "tp"), here()
    assert plan.entries[0].line == line
    chained = (
        Plan(mesh)
        .shard("w", Shard(0), "tp")  # Python counts a call from its name
        .local("m", Replicate(), "tp")
    )
    assert [int(one.line.split(":")[1]) for one in chained.entries] == sorted(
        {int(one.line.split(":")[1]) for one in chained.entries}
    )


def test_an_entry_of_the_zoo_has_both_lines(mesh):
    plan, line = zoo.mixtral(mesh, ep="tp"), here()
    assert {one.line.split(" > ")[0] for one in plan.entries} == {line}
    of = {one.path.text: one.line for one in plan.entries}
    layer = r"model\.layers\.\d+"
    assert of["lm_head.<in>"].split(" > ")[1].startswith("zoo/llama.py:")
    assert "lm_head.<in>" in source(of["lm_head.<in>"])
    assert "join(moved)}).<out>" in source(of[rf"{layer}\.(self_attn|mlp).<out>"])
    assert of[r".*\.mlp\.experts"].split(" > ")[1].startswith("zoo/experts.py:")
    assert "plan.local(experts" in source(of[r".*\.mlp\.experts"])


def test_an_entry_of_a_tp_plan_has_both_lines(mesh):
    plan, line = Plan.from_tp_plan(models.llama(), mesh), here()
    assert all(one.line.startswith(f"{line} > spec/transformers/") for one in plan.entries)
    assert all("plan.shard(" in source(one.line) for one in plan.entries)


def test_a_folder_with_this_package_as_prefix_is_the_users(mesh, tmp_path):
    beside = Path(plan_api.__file__).parent.with_name("plan_api_of_mine") / "train.py"
    found = {"Plan": Plan, "mesh": mesh, "Shard": Shard}
    exec(compile('plan = Plan(mesh).shard("w", Shard(0), "tp")', str(beside), "exec"), found)
    assert found["plan"].entries[0].line == "train.py:1"


def test_explain_and_errors_show_both_lines(mesh):
    plan, line = zoo.llama(mesh), here()
    rows = {row.site: row.line for row in explain(plan, models.llama()).rows}
    assert rows["lm_head"].startswith(f"{line} > zoo/llama.py:")
    assert f"{line} > zoo/llama.py:" in str(explain(plan, models.llama()))
    with pytest.raises(ValueError, match=rf"{line} > zoo/llama\.py:\d+: shard\("):
        explain(plan, torch.nn.Linear(2, 2))


def test_track_shows_both_lines(monkeypatch):
    monkeypatch.setattr(plan_api.options, "find_spec", lambda name: None)
    with fake_mesh((2,), ("tp",)) as mesh:
        plan, line = zoo.llama(mesh), here()
        model = parallelize(models.llama(), plan, src_data_rank=None)
        with track(model) as record:
            model(input_ids=torch.arange(8).view(1, 8))
    lines = {one.line for one in record.collectives if one.site == "model.layers.0.mlp"}
    (found,) = lines
    assert found.startswith(f"{line} > zoo/llama.py:")
    assert "join(moved)}).<out>" in source(found)
