"""Reads the run folder of a job."""

import signal
from dataclasses import dataclass
from pathlib import Path

from integration.compare.runner import Outcome
from integration.metrics import RunSummary, StepRecord, read_metrics, read_summary

_TAIL_LINES = 25


@dataclass(frozen=True)
class Failure:
    """Why a run has no result: a clause that follows its name, and the end of its log."""

    name: str
    reason: str
    log: Path
    tail: str


@dataclass(frozen=True)
class RunResult:
    """The files of a job.

    Attributes:
        records: the recorded steps, also of a failed run.
        summary: None if the run failed.
        failure: None if it did not.
    """

    outcome: Outcome
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    failure: Failure | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every recorded step."""
        return tuple(record.loss for record in self.records)


def read_run(outcome: Outcome) -> RunResult:
    """Reads a job's folder; an incomplete one is a failure, whatever the exit code."""
    job = outcome.job
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
    return RunResult(outcome, records, None if failure else summary, failure)


def _exit_reason(code: int) -> str | None:
    if code == 0:
        return None
    return f"ended with exit code {code}" if code > 0 else f"was killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
