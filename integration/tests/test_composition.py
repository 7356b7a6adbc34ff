"""The page of compositions has what the comparison and the option table train."""

import importlib.util
import json
from pathlib import Path

import pytest

from integration.compare.experiments.parallelism import EXPERIMENT
from integration.compare.variants import get_variant
from integration.option_table import policies
from integration.option_table.comparison_record import ComparisonRecord, Measurements
from integration.option_table.composition import load, main, page
from integration.option_table.policies import POLICIES, TEST_FILE, UNTESTED, cells_of
from integration.option_table.products import compared_runs, mode_of, product_of, products

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


def measured(differences, commit="0123456"):
    return Measurements("x", "2026-11-25", commit, "2.13.0", "y", 2, differences)


def rows_of(text):
    """Returns the cells of all rows by their first two."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {tuple(row[:2]): row for row in cells if len(row) > 1}


def test_the_page_is_written_from_the_runs():
    written = ROOT / "docs" / "support" / "composition.md"
    assert written.read_text() == page(load()), (
        "run: python -m integration.option_table.composition"
    )


@pytest.mark.parametrize(
    ("name", "product", "mode"),
    [
        ("plan-hsdp", "HSDP", "`plan`, Eager"),
        ("plan-zero3", "ZeRO-3 by phases", "`plan`, Eager"),
        ("plan-cp-tp-sp", "CP (ring) x TP x SP", "`plan`, Eager"),
        ("plan-dp-tp-sp-ep-static", "DP x TP x SP x EP", "`plan`, static"),
        ("titan-tp-sp-loss", "TP x SP x loss parallel", "`torchtitan-style`"),
        ("pp-1F1B-fsdp", "PP (1F1B) x FSDP", "`fsdp`"),
    ],
)
def test_a_variant_is_named_by_its_kinds_of_parallelism(name, product, mode):
    assert product_of(get_variant(name)) == product
    assert mode_of(get_variant(name)) == mode


def test_a_difference_is_that_of_the_run_and_missing_ones_are_named():
    record = ComparisonRecord((measured({"llama-tiny-init-plan-tp": 3e-7}),))
    rows = rows_of(page(record))
    assert rows["TP", "`plan-tp`"][4] == "not measured yet"  # of the last model
    section = page(record).partition("### llama-tiny")[2].partition("### mixtral-tiny")[0]
    rows = rows_of(section)
    assert rows["TP", "`plan-tp`"][4:6] == ["3e-7", "not measured yet"]
    assert rows["HSDP", "`plan-hsdp`"][4:7] == ["full", "full", "not measured yet"]
    assert rows["PP (1F1B) x DP", "`pp-1F1B-plan-dp`"][6] == "full"


def test_a_row_has_all_runs_of_a_variant_and_the_commits_that_measured_them():
    cases = {"llama-tiny-dropout-pp-1F1B": 0.0, "llama-tiny-neither-pp-1F1B": 2e-7}
    parts = [measured({name: value}, commit) for (name, value), commit in
             zip(cases.items(), ("aaaaaaa", "bbbbbbb"), strict=True)]  # fmt: skip
    text = page(ComparisonRecord(tuple(parts)))
    section = text.partition("### llama-tiny")[2].partition("### mixtral-tiny")[0]
    (row,) = [line for line in section.splitlines() if "| `pp-1F1B` |" in line]
    assert rows_of(row)["PP (1F1B)", "`pp-1F1B`"][5:9] == [
        *("0", "\N{EN DASH}", "2e-7", "aaaaaaa, bbbbbbb")
    ]
    commands = text.partition("commit of the measurement")[2].partition("###")[0]
    assert rows_of(commands)["bbbbbbb", "2026-11-25"][2:4] == ["1", "`x`"]


def test_a_comparison_replaces_what_is_known_of_its_own_runs():
    before = ComparisonRecord((measured({"a": 1.0, "b": 2.0}, "1"), measured({"c": 3.0}, "2")))
    after = before.updated(measured({"b": 4.0, "c": 5.0}, "3"))
    assert after.parts == (measured({"a": 1.0}, "1"), measured({"b": 4.0, "c": 5.0}, "3"))
    assert after.part_of("b") == after.parts[1]
    assert after.part_of("d") is None
    assert after.restricted_to({"b"}).parts == (measured({"b": 4.0}, "3"),)
    assert ComparisonRecord.of_json(after.as_json()) == after


def test_results_become_measurements_without_runs_that_have_no_verdict():
    run = {"name": "a", "judged": True, "deviation": {"maximum": 1e-7}}
    runs = [run, run | {"name": "b", "judged": False}, run | {"name": "c", "deviation": None}]
    facts = {"command": "x", "date": "2026-11-25 20:07 +0000", "git_commit": "0123456789"}
    results = {
        "environment": facts | {"torch": "2.13.0", "cpu": "y", "cores": 2},
        "experiments": {"parallelism": {"runs": runs}},
    }
    found = Measurements.of_results(results)
    assert found == measured({"a": 1e-7})
    facts["git_commit"] += " with uncommitted changes"
    results["environment"] |= facts
    assert Measurements.of_results(results) == measured({"a": 1e-7}, "0123456+")


def test_every_two_kinds_are_compared_run_or_refused():
    table = page(load()).partition("## Two kinds together")[2].partition("### What")[0]
    cells = {cell for row in rows_of(table).values() for cell in row[1:]}
    assert {"equal", "runs", "no"} < cells
    assert "untested" not in cells


def cells():
    """The cells of the table of policies, by product, system and policy."""
    names = [policy.name for policy in POLICIES]
    return {
        (product.name, product.variant.system, name): cell
        for product in products()
        for name, cell in zip(names, cells_of(product), strict=True)
    }


def test_every_product_is_trained_with_every_policy_or_refused():
    found = cells()
    assert {cell for cell in found.values() if isinstance(cell, str)} == {"equal", "tests"}
    assert found["PP x FSDP", "plan", "static"] == "equal"
    assert found["PP x FSDP", "plan", "recomputation"] == "tests"
    assert found["PP", "single", "dropout"] == "equal"
    assert found["FSDP", "fsdp", "bf16"] == found["PP x FSDP", "plan", "fp16"] == "tests"
    assert found["PP x CP (ring)", "plan", "dropout"] == "equal"
    assert {found[key] for key in found if key[2] in ("bf16", "fp16")} == {"tests"}


def test_a_product_that_no_run_has_with_a_policy_is_untested(monkeypatch):
    monkeypatch.setattr(policies, "policies_in_tests", lambda product: [])
    found = cells()
    assert found["PP x FSDP", "plan", "recomputation"] == UNTESTED
    assert found["DP", "plan", "checkpoints"] == UNTESTED
    assert found["FSDP", "fsdp", "bf16"] == "runs"


def test_the_test_that_the_page_names_trains_every_product():
    spec = importlib.util.spec_from_file_location("_policies_of_products", ROOT / TEST_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for test in (
        module.test_losses_are_those_of_one_device_with_each_policy,
        module.test_each_policy_is_in_effect,
        module.test_one_devices_checkpoint_is_loaded_and_the_other_way,
    ):
        (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        assert [each.values[0] for each in mark.args[1]] == list(products())


@pytest.mark.parametrize("product", products(), ids=lambda product: product.name)
def test_a_product_is_that_of_its_variants(product):
    named = [run for run in compared_runs(EXPERIMENT.full) if product.is_in(vars(run.job.config))]
    found = {product_of(get_variant(run.job.system), schedule=False) for run in named}
    assert found == {product.name}
    assert {run.job.config.system for run in named} == {product.variant.system}


def test_the_command_writes_the_page_after_the_results_of_a_part_of_the_runs(
    tmp_path, monkeypatch, capsys
):
    support = tmp_path / "docs" / "support"
    support.mkdir(parents=True)
    (support / "composition.json").write_text(Path("docs/support/composition.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert main(["--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["page"] == "docs/support/composition.md"
    assert found["products"] == len(products())
    assert found["runs"] == sum(len(part.differences) for part in load().parts)
    assert printed.err.count("\n") == 1
    written = ROOT / "docs" / "support" / "composition.md"
    assert (support / "composition.md").read_text() == written.read_text()
    before = load()
    run = {"name": "dit-tiny-init-plan-tp", "judged": True, "deviation": {"maximum": 5e-9}}
    facts = {"command": "x", "date": "2026-11-25 20:07 +0000", "git_commit": "0123456789"}
    results = {
        "environment": facts | {"torch": "2.13.0", "cpu": "y", "cores": 2},
        "experiments": {"parallelism": {"runs": [run, run | {"name": "an earlier one"}]}},
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert main([str(tmp_path / "results.json")]) == 0
    assert load().parts[-1] == measured({"dit-tiny-init-plan-tp": 5e-9})
    assert "| 5e-9 |" in (support / "composition.md").read_text()
    names = {name for part in before.parts for name in part.differences}
    assert {name for part in load().parts for name in part.differences} == names
