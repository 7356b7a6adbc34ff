"""Reads the run folders of an experiment and compares each run with its reference."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from integration.compare.measurements import (
    Cost,
    Deviation,
    LocalWork,
    cost,
    deviation,
    local_work,
)
from integration.compare.run import Run
from integration.compare.runner import Outcome
from integration.train.metrics import RunSummary, StepRecord, read_metrics, read_summary

_TAIL_LINES = 25


class Verdict(StrEnum):
    """The verdict on a run; ``SAME`` and ``OTHER`` are of runs with ``Run.equal``."""

    REFERENCE = "reference"
    EQUAL = "bitwise equal"
    SAME = "same numbers"
    WITHIN = "within tolerance"
    OUTSIDE = "outside tolerance"
    OTHER = "other numbers"
    UNJUDGED = "no verdict"
    FAILED = "failed"
    UNCOMPARED = "not compared"

    @property
    def passes(self) -> bool:
        """Whether a comparison with this verdict in it can pass."""
        return self not in _NOT_PASSED


_NOT_PASSED = (Verdict.OUTSIDE, Verdict.OTHER, Verdict.FAILED, Verdict.UNCOMPARED)


@dataclass(frozen=True)
class Failure:
    """Why a run has no result: a clause that follows its name, and the end of its log."""

    name: str
    reason: str
    log: Path
    tail: str


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        records: the recorded steps, also of a failed run.
        summary, work, cost: None if the run failed.
        deviation: deviation from the reference in the steps that decide; None for a reference, or
            if either run failed.
        whole: the same over all steps.
        equal: whether the fields of ``run.equal`` equal the reference's, bit for bit; empty where
            ``deviation`` is None.
    """

    run: Run
    verdict: Verdict
    records: tuple[StepRecord, ...]
    summary: RunSummary | None = None
    work: LocalWork | None = None
    cost: Cost | None = None
    deviation: Deviation | None = None
    whole: Deviation | None = None
    equal: Mapping[str, bool] = field(default_factory=dict)
    failure: Failure | None = None

    @property
    def system(self) -> str:
        """The name of the system."""
        return self.run.job.system

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.run.job.model

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every recorded step."""
        return tuple(record.loss for record in self.records)

    def facts(self) -> dict[str, Any]:
        """Returns every number, for results.json."""
        job, run = self.run.job, self.run
        about = {"name": job.name, "system": job.system, "model": job.model, "ranks": job.ranks}
        judged = {"tolerance": run.tolerance, "reference": run.reference, "judged": run.judged}
        measured = asdict(self)
        del measured["run"]
        return about | dict(run.labels) | judged | measured


def compare_runs(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> list[Result]:
    """Reads the run folders and compares each run with its reference; in the order of ``runs``."""
    found = {run.job.name: _read(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)}
    return [_compare(found[run.job.name], found[run.reference or run.job.name]) for run in runs]


def by_model(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Groups results by the name of their model, in order."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.model, []).append(result)
    return groups


@dataclass(frozen=True)
class _Files:
    """The files of a run; without a summary if it failed."""

    run: Run
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    failure: Failure | None

    @property
    def losses(self) -> tuple[float, ...]:
        return tuple(record.loss for record in self.records)


def _read(run: Run, outcome: Outcome) -> _Files:
    """Reads a run's folder; an incomplete one is a failure, whatever the exit code."""
    job = run.job
    reason = _exit_reason(outcome.exit_code)
    records: tuple[StepRecord, ...] = ()
    summary = None
    try:
        records = tuple(read_metrics(job.folder))
        if reason is None:
            summary = read_summary(job.folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = reason or f"exited with code 0 but wrote unreadable files: {error}"
    if reason is None and [each.step for each in records] != list(range(1, job.steps + 1)):
        reason = f"exited with code 0 but recorded {len(records)} of {job.steps} steps"
    log = outcome.log or job.log
    failure = None if reason is None else Failure(job.name, reason, log, _tail(log))
    return _Files(run, records, None if failure else summary, failure)


def _compare(own: _Files, reference: _Files) -> Result:
    run = own.run
    if own.summary is None:
        return Result(run, Verdict.FAILED, own.records, failure=own.failure)
    own_cost = cost(own.records, own.summary)
    found: Deviation | None = None
    whole: Deviation | None = None
    equal: dict[str, bool] = {}
    if reference.summary is not None and reference is not own:
        first = run.first_steps
        found = deviation(own.losses[:first], reference.losses[:first])
        whole = deviation(own.losses, reference.losses)
        equal = {name: _same(own.summary, reference.summary, name) for name in run.equal}
    return Result(
        run=run,
        verdict=_verdict(run, found, equal),
        records=own.records,
        summary=own.summary,
        work=local_work(own.summary),
        cost=own_cost,
        deviation=found,
        whole=whole,
        equal=equal,
    )


def _same(own: RunSummary, reference: RunSummary, name: str) -> bool:
    # Two missing hashes do not count as equal.
    value = getattr(own, name)
    return value is not None and bool(value == getattr(reference, name))


def _verdict(run: Run, found: Deviation | None, equal: Mapping[str, bool]) -> Verdict:
    if run.reference is None:
        return Verdict.REFERENCE
    if found is None:
        return Verdict.UNCOMPARED
    if not run.judged:
        return Verdict.UNJUDGED
    if not all(equal.values()):
        return Verdict.OTHER
    if not found.within(run.tolerance):
        return Verdict.OUTSIDE
    if equal:
        return Verdict.SAME
    return Verdict.EQUAL if found.bitwise_equal else Verdict.WITHIN


def _exit_reason(code: int) -> str | None:
    if code == 0:
        return None
    if code > 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
