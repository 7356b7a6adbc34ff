"""Every table of measurements has its command, its machine, its date and its commit."""

import re

import pytest

from tools.readme_commands import commands
from tools.workspace import ROOT

FOLDER = ROOT / "docs" / "benchmarks"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "index.md")


def sections(page):
    """Returns the sections with a table by their headings; the text before the first is all's."""
    top, *rest = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    parts = {"": top} if "\n|---" in top else {}
    return parts | {part.partition("\n")[0]: f"{top}\n{part}" for part in rest if "\n|---" in part}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_has_its_command_date_commit_and_machine(page, tmp_path):
    assert sections(page)
    for name, text in sections(page).items():
        part = tmp_path / "README.md"
        part.write_text(text)
        assert list(commands(part)), f"{page.name}: {name}: no command"
        for what, pattern in {
            "date": r"\b20\d\d-\d\d-\d\d\b",
            "commit": r"\b[0-9a-f]{7}\b",
            "machine": r"\bcores?\b",
        }.items():
            assert re.search(pattern, text), f"{page.name}: {name}: no {what}"


def test_the_index_leads_to_every_page():
    links = set(re.findall(r"\]\(([\w-]+\.md)\)", (FOLDER / "index.md").read_text()))
    assert links == {page.name for page in PAGES}
