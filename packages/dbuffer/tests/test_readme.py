"""The README's Python examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) >= 1


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[0][:40])
def test_an_example_runs(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
