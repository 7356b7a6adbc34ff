"""The page of compositions has what the comparison and the option table train."""

from dataclasses import replace
from pathlib import Path

import pytest

from integration.compare.variants import get_variant
from integration.option_table.composition import (
    Measurements,
    load,
    main,
    mode_of,
    page,
    product_of,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


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
    measured = replace(load(), differences={"llama-tiny-init-plan-tp": 3e-7})
    rows = rows_of(page(measured))
    assert rows["TP", "`plan-tp`"][4] == "not measured yet"  # of the last model
    section = page(measured).partition("### llama-tiny")[2].partition("### mixtral-tiny")[0]
    rows = rows_of(section)
    assert rows["TP", "`plan-tp`"][4:6] == ["3e-7", "not measured yet"]
    assert rows["HSDP", "`plan-hsdp`"][4:7] == ["full", "full", "not measured yet"]


def test_results_become_measurements_without_runs_that_have_no_verdict():
    run = {"name": "a", "judged": True, "deviation": {"maximum": 1e-7}}
    runs = [run, run | {"name": "b", "judged": False}, run | {"name": "c", "deviation": None}]
    facts = {"command": "x", "date": "2026-11-25 20:07 +0000", "git_commit": "0123456789"}
    results = {
        "environment": facts | {"torch": "2.13.0", "cpu": "y", "cores": 2},
        "experiments": {"parallelism": {"runs": runs}},
    }
    found = Measurements.of_results(results)
    assert found == Measurements("x", "2026-11-25", "0123456", "2.13.0", "y", 2, {"a": 1e-7})


def test_every_two_kinds_are_compared_run_or_refused():
    table = page(load()).partition("## Two kinds together")[2].partition("### What")[0]
    cells = {cell for row in rows_of(table).values() for cell in row[1:]}
    assert {"equal", "runs", "no"} < cells
    assert "untested" not in cells


def test_the_command_writes_the_page(tmp_path, monkeypatch):
    support = tmp_path / "docs" / "support"
    support.mkdir(parents=True)
    (support / "composition.json").write_text(Path("docs/support/composition.json").read_text())
    monkeypatch.chdir(tmp_path)
    main([])
    written = ROOT / "docs" / "support" / "composition.md"
    assert (support / "composition.md").read_text() == written.read_text()
