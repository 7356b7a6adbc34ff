"""Writes the last ``nox -s nightly`` into docs/nightly.md, a row per file, from its JUnit file.

Exits 1 where it ran no test or one failed; the record says so then.
"""

import datetime
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tools.test_counts import RESULTS, Counts
from tools.workspace import ROOT

RECORD = ROOT / "docs" / "nightly.md"


@dataclass(frozen=True)
class FileResult:
    """What the tests of one file came to.

    Attributes:
        counts: of its tests.
        seconds: that they took.
    """

    counts: Counts
    seconds: float


def read(report: Path) -> dict[str, FileResult]:
    """The results in a JUnit file of pytest's, by the module of the tests."""
    found: dict[str, FileResult] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        name = str(case.get("classname"))
        before = found.get(name, FileResult(Counts(), 0.0))
        counts = Counts(int(not failed and not skipped), int(failed), int(skipped))
        seconds = before.seconds + float(case.get("time", 0))
        found[name] = FileResult(before.counts + counts, seconds)
    return found


def text(results: dict[str, FileResult], heading: str) -> str:
    """The record, as Markdown."""
    total = sum((result.counts for result in results.values()), Counts())
    rows = [
        f"| `{name}` | {result.counts} | {result.seconds:.0f} s |"
        for name, result in sorted(results.items())
    ]
    return "\n".join(
        [
            "# The last run of the slow tier",
            "",
            f"`nox -s nightly`, {heading}: {total}.",
            "",
            "| tests | outcome | took |",
            "|---|---|---:|",
            *rows,
            "",
        ]
    )


def main(report: Path, record: Path = RECORD) -> int:
    """Writes the record; the exit status."""
    results = read(report)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{os.cpu_count()} cores, torch {version('torch')}"
    record.write_text(text(results, f"{today}, at {commit}, {machine}"))
    total = sum((result.counts for result in results.values()), Counts())
    print(total)
    return 0 if total.passed and not total.failed else 1


if __name__ == "__main__":
    sys.exit(main(RESULTS / "nightly.xml"))
