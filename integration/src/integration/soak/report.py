"""Writes the log of a soak: every incident, and the comparison of the losses."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from integration.report.command_output import to_json
from integration.report.markdown import render_markdown
from integration.report.section import (
    Column,
    Command,
    Paragraph,
    ReportPage,
    Section,
    Table,
    VerdictRow,
)
from integration.soak.supervisor import Incident
from integration.train.metrics import StepRecord


@dataclass(frozen=True)
class LossComparison:
    """The comparison of the losses of the disturbed and the undisturbed run.

    Attributes:
        steps: number of steps of each run.
        differing: steps whose losses differ in any bit, are missing, or are recorded twice.
    """

    steps: int
    differing: tuple[int, ...]

    def __str__(self) -> str:
        if not self.differing:
            return f"the losses of all {self.steps} steps are equal, bit for bit"
        first = ", ".join(map(str, self.differing[:5]))
        return (
            f"the losses of {len(self.differing)} of {self.steps} steps differ or are missing,"
            f" the first at {first}"
        )


@dataclass(frozen=True)
class Soak:
    """The result of a soak.

    Attributes:
        command: the command line.
        planned: number of planned faults.
        incidents: faults that the run recovered from.
        comparison: None if a run did not finish.
        failure: a sentence in that case.
    """

    command: str
    torch: str
    cores: int
    planned: int
    incidents: tuple[Incident, ...]
    comparison: LossComparison | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether both runs finished with equal losses."""
        return self.comparison is not None and not self.comparison.differing

    def as_json(self) -> dict[str, Any]:
        """Returns the log and the verdict, for soak.json."""
        return {"passed": self.passed, **asdict(self)}


def compare(
    undisturbed: Sequence[StepRecord], disturbed: Sequence[StepRecord], steps: int
) -> LossComparison:
    """Compares the losses of steps 1 to ``steps`` bit for bit."""
    first, second = _losses(undisturbed), _losses(disturbed)
    differing = (
        step
        for step in range(1, steps + 1)
        if len(first.get(step, ())) != 1 or first[step] != second.get(step)
    )
    return LossComparison(steps, tuple(differing))


def soak_of(
    arguments: Sequence[str],
    planned: int,
    incidents: Sequence[Incident],
    outcome: LossComparison | str,
) -> Soak:
    """Returns the log of a soak; ``outcome`` is a comparison, or the reason why there is none."""
    command = shlex.join(["python", "-m", "integration.soak", *arguments])
    compared = outcome if isinstance(outcome, LossComparison) else None
    failure = outcome if isinstance(outcome, str) else None
    cores = os.cpu_count() or 1
    return Soak(command, torch.__version__, cores, planned, tuple(incidents), compared, failure)


COLUMNS = (
    Column("step", is_number=True),
    Column("rank", is_number=True),
    Column("fault"),
    Column("detected after"),
    Column("ranks restarted after", is_number=True),
    Column("resumed from"),
    Column("next step after", is_number=True),
)


def cells(incident: Incident) -> tuple[str, ...]:
    """Returns a cell per column of ``COLUMNS``."""
    fault = incident.fault
    return (
        str(incident.at_step),
        str(fault.rank),
        str(fault.kind),
        f"{incident.noticed:.1f} s, by {incident.noticed_by}",
        f"{incident.restarted:.1f} s",
        incident.checkpoint,
        f"{incident.went_on:.1f} s",
    )


def describe(incident: Incident) -> str:
    """Returns an incident as a line of text."""
    pairs = zip(COLUMNS, cells(incident), strict=True)
    return ", ".join(f"{column.title} {cell}" for column, cell in pairs)


def soak_report(soak: Soak) -> ReportPage:
    """Returns the report of a soak: its verdict, every fault, and its command."""
    recovered = f"Recovered from {len(soak.incidents)} of {soak.planned} faults"
    verdict = VerdictRow(
        subject="disturbed run against undisturbed run",
        passes=soak.passed,
        finding=f"{recovered}; {soak.failure or soak.comparison}.",
    )
    table = Table(COLUMNS, tuple(cells(each) for each in soak.incidents))
    machine = Paragraph(f"torch {soak.torch}, {soak.cores} cores.")
    return ReportPage(
        title="A run with faults",
        sections=(
            Section("Faults", (table,), (verdict,)),
            Section("Reproduce", (Command(soak.command), machine)),
        ),
    )


def write_soak(soak: Soak, out: Path) -> Path:
    """Writes ``soak.md`` and ``soak.json`` into ``out``; returns the path of the first."""
    path = out / "soak.md"
    path.write_text(render_markdown(soak_report(soak)))
    path.with_suffix(".json").write_text(to_json(soak.as_json()) + "\n")
    return path


def _losses(records: Sequence[StepRecord]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in records:
        found.setdefault(record.step, []).append(record.loss.hex())
    return found
