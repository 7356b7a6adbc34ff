"""A run folder as it was found, before it is compared with another."""

import signal
from dataclasses import dataclass
from pathlib import Path

from integration.compare.runner import Outcome
from integration.metrics import RunSummary, StepRecord, read_metrics, read_summary

_TAIL_LINES = 25


@dataclass(frozen=True)
class Failure:
    """Why a run has no result: a clause that follows its name, and its log's end."""

    name: str
    reason: str
    log: Path
    tail: str


@dataclass(frozen=True)
class RunResult:
    """What a job left behind.

    Attributes:
        records: the steps that were written, also of a failed run.
        summary: absent when the run failed.
        failure: absent when it did not.
    """

    outcome: Outcome
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    failure: Failure | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step that was written."""
        return tuple(record.loss for record in self.records)


def read_run(outcome: Outcome) -> RunResult:
    """Read a job's folder; one that is not whole is a failure, however the process ended."""
    job = outcome.job
    reason = _exit_reason(outcome.exit_code)
    records: tuple[StepRecord, ...] = ()
    summary = None
    try:
        records = tuple(read_metrics(job.folder))
        if reason is None:
            summary = read_summary(job.folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = reason or f"ended well but left unreadable files: {error}"
    if reason is None and [each.step for each in records] != list(range(1, job.steps + 1)):
        reason = f"ended well but recorded {len(records)} of {job.steps} steps"
    log = outcome.log or job.log
    failure = None if reason is None else Failure(job.name, reason, log, _tail(log))
    return RunResult(outcome, records, None if failure else summary, failure)


def _exit_reason(code: int) -> str | None:
    if code == 0:
        return None
    return f"ended with exit code {code}" if code > 0 else f"was ended by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _tail(log: Path) -> str:
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
