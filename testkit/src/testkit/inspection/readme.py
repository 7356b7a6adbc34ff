"""The Python examples of a package's README, for the tests that run them unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["blocks", "examples", "run_example"]


def examples(test_file: str) -> list[str]:
    """The ``python`` blocks of the README two folders above a test's file.

    Args:
        test_file: ``__file__`` of a module in ``packages/<name>/tests``.

    Raises:
        ValueError: there is none.
    """
    readme = Path(test_file).resolve().parents[1] / "README.md"
    found = blocks(readme.read_text(), "python")
    if not found:
        raise ValueError(f"{readme} has no ```python block; expected one at least")
    return found


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a Markdown text in a language, those within lists dedented.

    Args:
        text: of a page, or of a part of one.
        language: the word behind the fence; empty: blocks that name none.
    """
    # Every opening fence is matched, so that none is taken for the end of another's block.
    fenced = r"^( *)```([^`\n]*)\n(.*?)^\1```$"
    found = re.findall(fenced, text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, word, code in found if word.strip() == language]


def run_example(code: str, folder: Path) -> None:
    """Runs an example in a process of its own, in an empty folder.

    Raises:
        CalledProcessError: it failed; what it printed is on the test's own output.
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
