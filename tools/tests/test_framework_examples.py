"""The examples with other frameworks train as the frameworks do with their own FSDP2."""

import re

import pytest

from fsdp.integrations import TESTED
from tools.workspace import ROOT

SCRIPTS = sorted((ROOT / "examples").glob("*/train.py"))


def test_there_is_an_example_for_each_row_of_the_readme():
    rows = (ROOT / "examples" / "README.md").read_text()
    assert SCRIPTS
    assert all(f"| `{script.parent.name}` |" in rows for script in SCRIPTS)


def test_the_versions_that_fsdp_calls_tested_are_those_pinned():
    lines = [
        line
        for file in ("constraints.txt", "examples/requirements.txt")
        for line in (ROOT / file).read_text().splitlines()
    ]
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    for framework, tested in TESTED.items():
        assert pins[framework] in tested, framework
    assert {script.parent.name for script in SCRIPTS} == set(TESTED)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_page_begins_with_pip_and_has_the_command_and_the_tested_version(script):
    name = script.parent.name
    text = (ROOT / "docs" / "frameworks" / f"{name}.md").read_text()
    command = f"python {script.relative_to(ROOT)} --ranks 2 --steps 4"
    assert 0 < text.index("pip install") < text.index(command)
    index = (ROOT / "docs" / "frameworks" / "index.md").read_text()
    assert re.search(rf"^\| \w+ \| {TESTED[name]} \| .*\({name}\.md\) \|$", index, re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_picture_of_losses_stands_beside_the_command_that_draws_it(script):
    name = script.parent.name
    page = ROOT / "docs" / "frameworks" / f"{name}.md"
    drawn = page.with_suffix(".svg").is_file()
    command = f"python {script.relative_to(ROOT)} --ranks 2 --steps"
    shown = re.search(rf"^{command} .*--plot docs/frameworks/{name}.svg$", page.read_text(), re.M)
    assert drawn == (shown is not None) == (f"]({name}.svg)" in page.read_text())


def test_a_picture_has_a_curve_of_each_system_and_case(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from side_by_side import Comparison, Run, draw

    run = Run([2.0, 1.0], 1.0, 1.0)
    draw([Comparison(case, run, run, 1e-5, 0.0) for case in ("", "muon")], tmp_path / "one.svg")
    text = (tmp_path / "one.svg").read_text()
    for label in ("native FSDP2", "fsdp", "muon native FSDP2", "muon fsdp", "optimizer step"):
        assert f"<!-- {label} -->" in text
