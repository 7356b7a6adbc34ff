"""The Python blocks of the site's own pages and of the README run on ranks, a page as one script.

The number of ranks is in the page's front matter, ``ranks: 2``, or in a comment on the landing
pages, where GitHub would show the front matter. Blocks check themselves: a page that promises equal
losses asserts it.
"""

import contextlib
import linecache
import re
import warnings
from pathlib import Path

import pytest

from testkit import run_ranks
from testkit.inspection.readme import blocks

ROOT = Path(__file__).parents[2]
FILES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted(ROOT.glob("docs/tutorials/*.md")),
    *sorted(ROOT.glob("docs/tasks/*.md")),
    *sorted(ROOT.glob("docs/concepts/*.md")),
]
PAGES = {
    str(page.relative_to(ROOT)): text
    for page in FILES
    if blocks(text := page.read_text(), "python")
}


def _run(examples, folder):
    """Run a page's blocks as one script on this rank."""
    from integration.train.session import restore_torch

    restore_torch()  # ranks of the pool have had different tests, and have to be alike
    code = "\n".join(examples)
    # The source of functions has to be found, as that of a script's is.
    name = f"<page {hash(code)}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    with contextlib.chdir(folder), warnings.catch_warnings():
        # torch.compile reads `.grad` of parameters that fsdp has gathered.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor")
        exec(compile(code, name, "exec"), {"__name__": "__page__"})


def _ranks(text):
    found = re.search(r"\A---\n(?:.*\n)*?ranks: (\d+)\n(?:.*\n)*?---\n", text)
    found = found or re.search(r"^<!-- ranks: (\d+) -->$", text, re.MULTILINE)
    assert found, "expected `ranks: N` in the front matter of a page with Python blocks"
    return int(found[1])


# The slowest pages; of the others each shows a task, or a way to begin.
SLOW = {
    "docs/tasks/evaluate.md",
    "docs/tasks/generate.md",
    "docs/tasks/optimizers-precision.md",
    "docs/tasks/save-resume.md",
    "docs/tutorials/from-torchtitan.md",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PAGES],
)
def test_a_page_runs(name, tmp_path):
    text = PAGES[name]
    run_ranks(_run, _ranks(text), blocks(text, "python"), str(tmp_path), timeout=240)


def test_every_page_with_blocks_checks_something():
    assert [name for name, text in PAGES.items() if "assert" not in text] == []
