"""The pages of the API have every public name of a package, and only names that exist."""

import ast
import re

import pytest

from tools.workspace import ROOT, packages

PROJECTS = packages()


def public_names(source):
    """Returns ``__all__`` of a package, read without importing it."""
    for node in ast.parse((source / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_the_page_has_every_public_name(project):
    text = (ROOT / "docs" / "packages" / project.name / "api.md").read_text()
    shown = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    shown |= set(re.findall(r"`(?:\w+\.)*(\w+)`", text))
    assert public_names(project.source) - shown == set()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_no_entry_is_of_another_package_or_shown_twice(project):
    text = (ROOT / "docs" / "packages" / project.name / "api.md").read_text()
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert {entry.partition(".")[0] for entry in entries} == {project.source.name}
    assert len(entries) == len(set(entries))
