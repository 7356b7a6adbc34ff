"""Reads the Python examples of a package's pages, for the tests that run them unchanged."""

from __future__ import annotations

import contextlib
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from testkit.ranks import run_python

__all__ = ["blocks", "examples", "page_examples", "run_examples"]


def examples(test_file: str) -> list[str]:
    """Returns the ``python`` blocks of a package's README.

    Args:
        test_file: ``__file__`` of a module in ``<package>/tests``.

    Raises:
        ValueError: the README has no such block.
    """
    page = Path(test_file).resolve().parents[1] / "README.md"
    found = blocks(page.read_text(), "python")
    if not found:
        raise ValueError(f"{page}: expected at least one ```python block, got none")
    return found


def page_examples(test_file: str) -> list[str]:
    """Returns the ``python`` blocks of all pages in ``docs/packages/<package>``, by page name.

    ``example.md`` is left out: its scripts are run by commands of that page.

    Args:
        test_file: ``__file__`` of a module in ``packages/<package>/tests``.

    Raises:
        ValueError: no page has such a block.
    """
    package = Path(test_file).resolve().parents[1]
    folder = package.parents[1] / "docs" / "packages" / package.name
    pages = sorted(page for page in folder.glob("*.md") if page.name != "example.md")
    found = [code for page in pages for code in blocks(page.read_text(), "python")]
    if not found:
        raise ValueError(f"{folder}: expected at least one ```python block, got none")
    return found


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a Markdown text in a language, without their indentation.

    Args:
        text: a page, or a part of one.
        language: as named after the opening fence; empty for blocks that name none.
    """
    # Blocks of other languages are matched too, or their closing fences would open a block here.
    fenced = r"^( *)```([^`\n]*)\n(.*?)^\1```$"
    found = re.findall(fenced, text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, word, code in found if word.strip() == language]


def run_examples(codes: Sequence[str], folder: Path) -> None:
    """Runs examples as scripts, one after another, each in a process of `run_python`.

    What they print is printed.

    Args:
        codes: their sources.
        folder: in which they run; they are written there, as ``example1.py`` and so on.

    Raises:
        CalledProcessError: an example failed; the test's output has the traceback, and those after
            it did not run.
    """
    paths = [folder / f"example{number}.py" for number in range(1, len(codes) + 1)]
    for path, code in zip(paths, codes, strict=True):
        path.write_text(code)
    for path in paths:
        with contextlib.chdir(folder):
            done = run_python(str(path), timeout=300)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        done.check_returncode()
