"""docs/tasks/hangs.md has every checking mode of the packages, and none that is not there."""

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks" / "hangs.md").read_text()
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/__init__.py"))
VARIABLE = re.compile(rf"\b(?:{'|'.join(name.upper() for name in PACKAGES)})_[A-Z_]+")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]


def _strings(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_variable_that_a_package_reads_is_on_the_page_with_a_command():
    sources = [
        path for path in ROOT.glob("packages/*/src/**/*.py") if "environ" in path.read_text()
    ]
    read = {text for path in sources for text in _strings(path) if VARIABLE.fullmatch(text)}
    assert {"DBUFFER_CHECK", "DTENSOR_RULES_CHECK", "DTENSOR_RULES_LOGS"} <= read
    assert set(VARIABLE.findall(PAGE)) == read
    rows = {row.split("|")[1].strip(" `"): row.split("|")[-2] for row in ROWS}
    assert all(f"{name}=" in rows[name] and "python" in rows[name] for name in read)


def test_what_the_page_names_of_a_package_is_there():
    named = set(re.findall(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)", PAGE))
    assert {name.partition(".")[0] for name in named} == set(PACKAGES) - {"fsdp"}
    for name in named:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_row_says_what_it_finds_what_it_costs_and_how_to_use_it():
    assert len(ROWS) > 12
    assert all(len(row.split("|")) == 6 and all(row.split("|")[1:-1]) for row in ROWS)
