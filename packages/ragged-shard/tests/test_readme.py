"""The examples of the README and of the package's pages run, and print the output shown there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from testkit import TORCH_RELEASE
from testkit.inspection.readme import blocks, examples, page_examples, run_examples

PAGE = (Path(__file__).parents[3] / "docs/packages/ragged-shard/details.md").read_text()
EXAMPLES = [*examples(__file__), *page_examples(__file__)]
# A terminal's output has spaces at the ends of lines, and rules as wide as the terminal.
RULE = re.compile(r"^[ ─]+$")


def shown(text):
    lines = (line.rstrip() for line in text.splitlines())
    return [line for line in lines if line and not RULE.match(line)]


def test_examples_run(tmp_path):
    # The page of a first change adds a rule for flip, which torch 2.11 has no strategy for.
    lacking = [".flip("] if TORCH_RELEASE < (2, 12) else []
    run = [one for one in EXAMPLES if not any(name in one for name in lacking)]
    assert len(run) == len(EXAMPLES) - len(lacking)
    run_examples(run, tmp_path)


def test_the_picture_of_a_placement_is_what_its_example_prints(tmp_path, capfd):
    (code,) = (each for each in blocks(PAGE, "python") if "StridedRaggedShard" in each)
    (picture,) = (each for each in blocks(PAGE, "") if each.startswith("tensor (6, 8)"))
    run_examples([code], tmp_path)
    assert shown(capfd.readouterr().out) == shown(picture)


def test_the_planners_command_prints_the_table_beside_it(tmp_path):
    command, table = (each for each in blocks(PAGE, "") if "deepseek-v3" in each)
    program, *arguments = shlex.split(command)
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown(done.stdout) == shown(table)
