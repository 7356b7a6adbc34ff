"""The Python examples of a package's README, for the tests that run them as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["examples", "run_example"]


def examples(test_file: str) -> list[str]:
    """The ``python`` blocks of the README two folders above a test's file.

    Args:
        test_file: ``__file__`` of a module in ``packages/<name>/tests``.

    Raises:
        ValueError: there is none.
    """
    readme = Path(test_file).resolve().parents[1] / "README.md"
    blocks = re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    if not blocks:
        raise ValueError(f"{readme} has no ```python block; a test of its examples wants one")
    return blocks


def run_example(code: str, folder: Path) -> None:
    """Runs an example in a process of its own, in an empty folder.

    Raises:
        CalledProcessError: it failed; what it printed is on the test's own output.
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
