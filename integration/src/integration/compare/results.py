"""What the runs of a comparison come to, as data."""

import json
import math
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from integration.compare.cost import Cost, cost
from integration.compare.curves import Deviation, deviation
from integration.compare.runner import Outcome
from integration.metrics import RunSummary, StepRecord, read_metrics, read_summary

RESULTS_FILE = "results.json"
_TAIL_LINES = 25


class Verdict(StrEnum):
    """What a system's run comes to."""

    REFERENCE = "reference"
    EQUAL = "bitwise equal"
    WITHIN = "within tolerance"
    OUTSIDE = "outside tolerance"
    FAILED = "failed"
    UNCOMPARED = "not compared"

    @property
    def passes(self) -> bool:
        """Whether a comparison with this verdict in it can pass."""
        return self in (Verdict.REFERENCE, Verdict.EQUAL, Verdict.WITHIN)


@dataclass(frozen=True)
class Failure:
    """Why a run has no result: a clause that follows its system's name, and its log's end."""

    reason: str
    log: Path
    tail: str


@dataclass(frozen=True)
class SystemResult:
    """One system's run.

    Attributes:
        records: the steps that were written, also of a failed run.
        summary, cost: absent when the run failed.
        deviation: absent when it or the reference failed, and of the reference itself.
        relative_step_time: median step time over the reference's.
    """

    system: str
    ranks: int
    tolerance: float
    verdict: Verdict
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    cost: Cost | None
    deviation: Deviation | None
    relative_step_time: float | None
    failure: Failure | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step that was written."""
        return tuple(record.loss for record in self.records)


def passes(results: Sequence[SystemResult]) -> bool:
    """Return whether every run finished and every curve stayed within its tolerance."""
    return all(result.verdict.passes for result in results)


def collect(outcomes: Sequence[Outcome]) -> list[SystemResult]:
    """Read the run folders and compare every curve with the first one's."""
    finished = [_read(outcome) for outcome in outcomes]
    return [_against(run, finished[0], is_reference=run is finished[0]) for run in finished]


def write_results(path: Path, results: Sequence[SystemResult], about: dict[str, Any]) -> None:
    """Write everything as JSON; numbers that JSON lacks become "nan", "inf" and "-inf"."""
    document = {"passes": passes(results), **about, "systems": [asdict(each) for each in results]}
    path.write_text(json.dumps(_jsonable(document), indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class _Run:
    """A run folder as it was found, before it is compared."""

    outcome: Outcome
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    failure: Failure | None


def _read(outcome: Outcome) -> _Run:
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
    failure = None if reason is None else Failure(reason, job.log, _tail(job.log))
    return _Run(outcome, records, None if failure else summary, failure)


def _against(run: _Run, reference: _Run, *, is_reference: bool) -> SystemResult:
    job = run.outcome.job
    losses = [record.loss for record in run.records]
    found: Deviation | None = None
    own_cost: Cost | None = None
    relative: float | None = None
    if run.summary is not None:
        own_cost = cost(run.records, run.summary)
    if run.summary is not None and reference.summary is not None:
        assert own_cost is not None
        own = cost(reference.records, reference.summary)
        relative = own_cost.step_seconds / own.step_seconds
        if not is_reference:
            found = deviation(losses, [record.loss for record in reference.records])
    return SystemResult(
        system=job.system,
        ranks=job.ranks,
        tolerance=job.tolerance,
        verdict=_verdict(run, found, is_reference=is_reference),
        records=run.records,
        summary=run.summary,
        cost=own_cost,
        deviation=found,
        relative_step_time=relative,
        failure=run.failure,
    )


def _verdict(run: _Run, found: Deviation | None, *, is_reference: bool) -> Verdict:
    if run.failure is not None:
        return Verdict.FAILED
    if is_reference:
        return Verdict.REFERENCE
    if found is None:
        return Verdict.UNCOMPARED
    if found.bitwise_equal:
        return Verdict.EQUAL
    return Verdict.WITHIN if found.within(run.outcome.job.tolerance) else Verdict.OUTSIDE


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


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
