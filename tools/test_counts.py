"""Counts the tests that the last ``nox -s tests`` ran, from its JUnit files, one row a project.

Exits 1 when a project ran none, left no file, or had a failure. The last line, ``N passed, N
failed, N skipped``, is for the eye and for whatever reads the log.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.run_tests import PROJECTS, RESULTS


@dataclass(frozen=True)
class Counts:
    """What one pytest run came to; an error in a fixture or at collection is a failure."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def read(report: Path) -> Counts:
    """The counts in one JUnit file; none at all if there is no such file."""
    if not report.is_file():
        return Counts()
    total = Counts()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        total += Counts(int(suite.get("tests", 0)) - failed - skipped, failed, skipped)
    return total


def main(names: Iterable[str], results: Path = RESULTS) -> int:
    """Prints the table and the closing line; the exit status."""
    counts = {name: read(results / f"{name}.xml") for name in names}
    for name, of_one in counts.items():
        ran = of_one.passed + of_one.failed > 0
        print(f"{name:15} {of_one}{'' if ran else '  <- ran no test: that is a failure'}")
    total = sum(counts.values(), Counts())
    print(total)
    ran_everywhere = all(one.passed + one.failed > 0 for one in counts.values())
    return 0 if ran_everywhere and total.failed == 0 else 1


if __name__ == "__main__":
    sys.exit(main(PROJECTS))
