"""Writes what `nox -s examples` measured: ``python -m tools.example_results FOLDER [OPTION ...]``.

FOLDER has a file of ``examples/EXAMPLE/train.py --json`` for each example, named after it; the
options are those of the run. docs/benchmarks/examples.md has the table.
"""

import datetime
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.workspace import ROOT, commit_of_tree

PAGE = ROOT / "docs" / "benchmarks" / "examples.md"
HEAD = (
    "# Examples with other frameworks\n\n"
    "Losses, time and memory of the [examples](../../examples/README.md), with a framework's own "
    "FSDP2 and with fsdp, on the same model and data. Written by the command of the table, whose "
    "run fails where losses differ by more than the tolerance. Time is that of the whole run on "
    "the slowest rank, without imports, and memory the growth of peak resident memory of one "
    "rank; both include what the framework does before the first step.\n"
)


def rows(folder: Path) -> list[str]:
    """The rows of the table, sorted by example."""
    found = []
    for file in sorted(folder.glob("*.json")):
        for one in json.loads(file.read_text()):
            example = f"{file.stem}, {one['case']}" if one["case"] else file.stem
            native, own = one["native"], one["fsdp"]
            found.append(
                f"| {example} | {_losses(native)} | {_losses(own)} "
                f"| {one['difference']:.1e} of {one['tolerance']:g} "
                f"| {native['seconds']:.1f} | {own['seconds']:.1f} "
                f"| {native['mib']:.0f} | {own['mib']:.0f} |"
            )
    return found


def page(folder: Path, options: Sequence[str]) -> str:
    """The page, as Markdown."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    commit = commit_of_tree("docs/benchmarks/examples.md")
    command = " ".join(["nox -s examples", *(["--", *options] if options else [])])
    loads = [one["load"] for one in _comparisons(folder)]
    lines = [HEAD, f"`{command}` on {today}, at {commit}, on {os.cpu_count()} cores with load "]
    lines[-1] += f"{min(loads):.0f} to {max(loads):.0f}, torch {version('torch')}:"
    lines += ["", "| example | losses, native: first, last | fsdp | difference, of tolerance "]
    lines[-1] += "| s, native | fsdp | MiB, native | fsdp |"
    lines += ["|---|---|---|---|---:|---:|---:|---:|", *rows(folder), ""]
    return "\n".join(lines)


def _comparisons(folder: Path) -> list[dict[str, Any]]:
    return [one for file in folder.glob("*.json") for one in json.loads(file.read_text())]


def _losses(run: dict[str, Any]) -> str:
    return f"{run['losses'][0]:.6f}, {run['losses'][-1]:.6f}"


if __name__ == "__main__":
    PAGE.write_text(page(Path(sys.argv[1]), sys.argv[2:]))
