"""Records what a run of the slow tier came to: ``python -m tools.nightly_record REPORT ...``.

A REPORT is a JUnit file of pytest's: ``slow-PROJECT.xml`` of a project's tests marked slow, as
``tools.run_tests --slow`` leaves it, or of a package's tests with another torch, ``--package
NAME``. In docs/support, nightly.json has the results, nightly.md the tables made of them. Exits 1
where no test ran or one failed; the record says so then. ``--modules`` adds a run of some files of
a project, such as those that a commit has mended: the project's other modules keep their results,
with their commit.
"""

import argparse
import datetime
import json
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from tools.test_counts import Counts
from tools.workspace import ROOT, commit_of_tree

PAGES = ROOT / "docs" / "support"


@dataclass(frozen=True)
class Result:
    """What tests came to, and where.

    Attributes:
        counts: of the tests.
        seconds: that they took.
        date: of the run, as ISO 8601 has it.
        commit: as ``git describe --always`` names it; the record itself may differ from it.
        torch: its version.
        cores: of the machine.
    """

    counts: Counts
    seconds: float
    date: str
    commit: str
    torch: str
    cores: int

    @property
    def where(self) -> str:
        """The date, commit and machine in words."""
        return f"{self.date}, at {self.commit}, {self.cores} cores, torch {self.torch}"


@dataclass(frozen=True)
class Record:
    """The last results.

    Attributes:
        slow: of the tests marked slow, by project and by module.
        others: of all tests of a package, by package and by minor version of torch.
    """

    slow: dict[str, dict[str, Result]]
    others: dict[str, dict[str, Result]]


def read_reports(reports: Iterable[Path]) -> dict[str, Result]:
    """The results in JUnit files of pytest's, by the module of the tests."""
    commit = commit_of_tree("docs/support/nightly.*")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cores = os.cpu_count() or 1
    found: dict[str, tuple[Counts, float]] = {}
    cases = (ElementTree.parse(report).getroot().iter("testcase") for report in reports)
    for case in chain.from_iterable(cases):
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        name = str(case.get("classname"))
        before, seconds = found.get(name, (Counts(), 0.0))
        counts = Counts(int(not failed and not skipped), int(failed), int(skipped))
        found[name] = (before + counts, seconds + float(case.get("time", 0)))
    return {
        name: Result(counts, seconds, today, commit, version("torch"), cores)
        for name, (counts, seconds) in found.items()
    }


def read(path: Path) -> Record:
    """The record in a JSON file; an empty one if there is no such file."""
    if not path.is_file():
        return Record({}, {})

    def result(fields: dict[str, object]) -> Result:
        return Result(**{**fields, "counts": Counts(**fields["counts"])})  # type: ignore[arg-type]

    data = json.loads(path.read_text())
    return Record(
        *(
            {
                name: {key: result(fields) for key, fields in of_one.items()}
                for name, of_one in data[part].items()
            }
            for part in ("slow", "others")
        )
    )


def total(results: Iterable[Result]) -> Counts:
    """The counts of all of them."""
    return sum((result.counts for result in results), Counts())


def page(record: Record) -> str:
    """The record, as Markdown."""
    lines = ["# The last run of the slow tier", ""]
    lines += ["Written by `nox -s nightly`, from `docs/support/nightly.json`.", ""]
    modules = [pair for _, of_one in sorted(record.slow.items()) for pair in sorted(of_one.items())]
    if modules:
        lines += ["## Tests marked slow", ""]
        lines += [f"`nox -s nightly`: {total(result for _, result in modules)}.", ""]
    for where in sorted({result.where for _, result in modules}):
        lines += [f"On {where}:", "", "| tests | outcome | took |", "|---|---|---:|"]
        lines += [
            f"| `{name}` | {result.counts} | {result.seconds:.0f} s |"
            for name, result in modules
            if result.where == where
        ]
        lines.append("")
    if record.others:
        versions = sorted({torch for of_one in record.others.values() for torch in of_one})
        lines += ["## Other versions of torch", ""]
        lines += ['`nox -s "compat(2.11)"` and the like: all tests of a package but the slow. With']
        lines += ["the pinned torch `.ci/run` runs them.", ""]
        lines += [f"| package | {' | '.join(f'torch {torch}' for torch in versions)} |"]
        lines += ["|---" * (len(versions) + 1) + "|"]
        for package, of_one in sorted(record.others.items()):
            cells = (_cell(of_one[torch]) if torch in of_one else "not run" for torch in versions)
            lines.append(f"| {package} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    return f"{result.counts} ({result.date}, at {result.commit})"


def main(
    reports: Iterable[Path],
    package: str | None = None,
    pages: Path = PAGES,
    *,
    of_modules: bool = False,
) -> int:
    """Adds the results of reports to the record; the exit status.

    Args:
        reports: JUnit files; the results replace those of the same projects.
        package: whose tests these are, with another torch; None for the tests marked slow.
        pages: the folder of nightly.json and nightly.md.
        of_modules: replace the results of the modules in the reports only.
    """
    by_report = {report: read_reports([report]) for report in reports}
    results = {name: one for found in by_report.values() for name, one in found.items()}
    record = read(pages / "nightly.json")
    counts = total(results.values())
    if package is None:
        by_project = {
            report.stem.removeprefix("slow-"): found for report, found in by_report.items()
        }
        if of_modules:
            by_project = {
                name: record.slow.get(name, {}) | found for name, found in by_project.items()
            }
        record = Record({**record.slow, **by_project}, record.others)
    elif results:
        one = next(iter(results.values()))
        seconds = sum(result.seconds for result in results.values())
        whole = Result(counts, seconds, one.date, one.commit, one.torch, one.cores)
        minor = ".".join(one.torch.split(".")[:2])
        of_package = {**record.others.get(package, {}), minor: whole}
        record = Record(record.slow, {**record.others, package: of_package})
    (pages / "nightly.json").write_text(json.dumps(asdict(record), indent=1, sort_keys=True) + "\n")
    (pages / "nightly.md").write_text(page(record))
    print(counts)
    return 0 if counts.passed and not counts.failed else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT")
    parser.add_argument("--package")
    parser.add_argument("--modules", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.reports, given.package, of_modules=given.modules))
