"""Reads the Python examples of a package's README, for the tests that run them unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["blocks", "examples", "run_example"]


def examples(test_file: str, *pages: str) -> list[str]:
    """Returns the ``python`` blocks of a package's README and of other pages about the package.

    Args:
        test_file: ``__file__`` of a module in ``<package>/tests``.
        pages: paths from the root of the repository, which is two folders above the package.

    Raises:
        ValueError: one of them has no such block.
    """
    package = Path(test_file).resolve().parents[1]
    found = []
    for page in [package / "README.md", *(package.parents[1] / path for path in pages)]:
        shown = blocks(page.read_text(), "python")
        if not shown:
            raise ValueError(f"{page}: expected at least one ```python block, got none")
        found += shown
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


def run_example(code: str, folder: Path) -> None:
    """Runs an example in a separate process, in an empty folder.

    Raises:
        CalledProcessError: the example failed; its output is part of the test's output.
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
