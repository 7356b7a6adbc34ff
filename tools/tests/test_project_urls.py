"""The urls of packages are made from one address."""

import tomllib

import pytest

from tools.project_urls import repository, urls_of, with_urls
from tools.workspace import packages

TEXT = """[project]
name = "one"
dependencies = ["torch"]

[project.entry-points."x"]
y = "z"

[tool.scikit-build]
build-dir = "build"
"""
ADDRESS = "https://example.org/us/repository"


def test_urls_are_written_before_the_build_settings_and_replaced():
    urls = urls_of("one", ADDRESS)
    once = with_urls(TEXT, urls)
    table = tomllib.loads(once)
    assert table["project"]["urls"] == urls
    assert urls["Changelog"] == f"{ADDRESS}/blob/main/packages/one/CHANGELOG.md"
    assert {key: table[key] for key in ("tool",)} == {
        "tool": {"scikit-build": {"build-dir": "build"}}
    }
    assert with_urls(once, urls) == once
    moved = with_urls(once, urls_of("one", "https://example.org/them"))
    assert "example.org/us" not in moved
    assert tomllib.loads(moved)["project"]["entry-points"] == {"x": {"y": "z"}}


def test_without_an_address_there_are_no_urls():
    assert urls_of("one", "") == {}
    assert with_urls(TEXT, {}) == TEXT
    assert with_urls(with_urls(TEXT, urls_of("one", ADDRESS)), {}) == TEXT


@pytest.mark.parametrize("project", packages(), ids=lambda project: project.name)
def test_packages_have_the_urls_of_the_one_address(project):
    assert project.metadata.get("urls", {}) == urls_of(project.name, repository())
