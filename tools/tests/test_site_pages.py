"""tools.site_pages: pages outside docs/, links of the repository as links of the site."""

import re
from types import SimpleNamespace

import pytest

from tools.site_pages import on_post_page, search_boost, site_links
from tools.workspace import ROOT


@pytest.fixture
def repository(tmp_path):
    for path in ("README.md", "packages/a/README.md", "packages/a/src/a.py", "docs/tasks/save.md"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    (tmp_path / "docs/tasks/index.md").write_text("")
    return tmp_path


KNOWN = {"packages/a/README.md", "tasks/save.md", "tasks/index.md"}


def rewritten(markdown, repository, source="docs/tasks/save.md"):
    uri = source.removeprefix("docs/")
    found = (repository / source).relative_to(repository)
    return site_links(markdown, source=found, uri=uri, known=KNOWN, root=repository)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("docs/tasks/save.md", "[a](../../packages/a)", "[a](../packages/a/README.md)"),
        (
            "docs/tasks/save.md",
            "[a](../../packages/a/README.md#b)",
            "[a](../packages/a/README.md#b)",
        ),
        ("docs/tasks/save.md", "[a](../tasks)", "[a](index.md)"),
        ("docs/tasks/save.md", "![a](index.md)", "![a](index.md)"),
        ("packages/a/README.md", "[save](../../docs/tasks/save.md)", "[save](../../tasks/save.md)"),
        ("packages/a/README.md", "[`a.py`](src/a.py)", "`a.py`"),
        (
            "packages/a/README.md",
            "[of [b]](../../docs/tasks/save.md)",
            "[of [b]](../../tasks/save.md)",
        ),
        ("packages/a/README.md", "[b](https://b.c/d.md) [e](#f)", "[b](https://b.c/d.md) [e](#f)"),
    ],
)
def test_a_link_leads_to_the_page_or_becomes_text(repository, source, link, expected):
    assert rewritten(link, repository, source) == expected


def test_code_is_not_a_link(repository):
    code = "`[S(0), R](x)`\n\n```python\na = [b](c.md)\n```\n"
    assert rewritten(code, repository) == code


def test_a_link_without_a_target_is_an_error(repository):
    with pytest.raises(ValueError, match=r"docs/tasks/save\.md: expected .*, got \.\./no\.md"):
        rewritten("[a](../no.md)", repository)


def test_search_ranks_tasks_before_decisions():
    pages = ("tasks/hangs.md", "concepts/plans.md", "adr/0011-a-hang.md")
    assert [search_boost(page) for page in pages] == [2.0, 1.0, 0.5]
    assert search_boost("packages/fsdp/CHANGELOG.md") == search_boost("packages/fsdp/api.md") == 0.5


def test_the_site_loads_nothing_from_another_host():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert "- offline" in settings
    for page in ROOT.glob("docs/**/*.md"):
        text = page.read_text()
        assert "```mermaid" not in text, page
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|iframe)[^>]+https?:", text), page


@pytest.mark.parametrize(
    ("url", "expected"),
    [("index.html", "assets/"), ("tasks/save.html", "../assets/"), ("a/b/c.html", "../../assets/")],
)
def test_the_search_loads_no_script_from_another_host(url, expected):
    html = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    found = on_post_page(html, page=SimpleNamespace(url=url), config=None)
    assert found == f'<script src="{expected}iframe-worker.js"></script>'
    assert (ROOT / "docs" / "assets" / "iframe-worker.js").is_file()
