"""The log of a soak: every fault and what came of it, and the comparison of the losses."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from integration.metrics import StepRecord
from integration.soak.supervisor import Incident


@dataclass(frozen=True)
class LossComparison:
    """The losses of the disturbed run beside those of the undisturbed one.

    Attributes:
        steps: that were wanted of both.
        differing: those whose losses differ in any bit, or are missing or there twice.
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
    """What a soak came to.

    Attributes:
        command: that gives it again.
        faults: that were planned.
        incidents: those of them that the run got over.
        comparison: None where a run did not come to its end.
        failure: a sentence in that case.
    """

    command: str
    torch: str
    cores: int
    fault_schedule: int
    incidents: tuple[Incident, ...]
    comparison: LossComparison | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether every fault left the losses as they were."""
        return self.comparison is not None and not self.comparison.differing


def compare(
    undisturbed: Sequence[StepRecord], disturbed: Sequence[StepRecord], steps: int
) -> LossComparison:
    """Compare the bits of the losses of steps 1 to ``steps``."""
    first, second = _losses(undisturbed), _losses(disturbed)
    differing = (
        step
        for step in range(1, steps + 1)
        if len(first.get(step, ())) != 1 or first[step] != second.get(step)
    )
    return LossComparison(steps, tuple(differing))


def soak_of(
    arguments: Sequence[str],
    fault_schedule: int,
    incidents: Sequence[Incident],
    outcome: LossComparison | str,
) -> Soak:
    """Return the log of a soak whose ``outcome`` is a comparison, or why there is none."""
    command = shlex.join(["python", "-m", "integration.soak", *arguments])
    compared = outcome if isinstance(outcome, LossComparison) else None
    failure = outcome if isinstance(outcome, str) else None
    cores = os.cpu_count() or 1
    return Soak(
        command, torch.__version__, cores, fault_schedule, tuple(incidents), compared, failure
    )


def row(incident: Incident) -> str:
    """Return an incident as a row of a Markdown table."""
    fault = incident.fault
    return (
        f"| {incident.at_step} | {fault.rank} | {fault.kind} | {incident.noticed:.1f} s, by"
        f" {incident.noticed_by} | {incident.restarted:.1f} s | {incident.checkpoint} |"
        f" {incident.went_on:.1f} s |"
    )


HEADER = (
    "| step | rank | fault | noticed after | ranks restarted after | resumed from |"
    " trained on after |\n|---:|---:|---|---|---:|---|---:|"
)


def write_report(soak: Soak, out: Path) -> Path:
    """Write ``soak.md`` and ``soak.json`` into ``out``; return the path of the first."""
    verdict = soak.failure or str(soak.comparison)
    lines = [
        f"`{soak.command}`, torch {soak.torch}, {soak.cores} cores:",
        "",
        HEADER,
        *map(row, soak.incidents),
        "",
        f"{len(soak.incidents)} of {soak.fault_schedule} faults got over; {verdict}.",
    ]
    path = out / "soak.md"
    path.write_text("\n".join(lines) + "\n")
    path.with_suffix(".json").write_text(json.dumps(asdict(soak), indent=2) + "\n")
    return path


def _losses(records: Sequence[StepRecord]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for record in records:
        found.setdefault(record.step, []).append(record.loss.hex())
    return found
