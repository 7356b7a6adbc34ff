"""What the runs of kinds of parallelism come to, as data."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from integration.compare.cost import LocalWork, local_work
from integration.compare.deviation import Deviation, deviation
from integration.compare.parallel_jobs import ParallelCase, ParallelJob
from integration.compare.random_jobs import Source
from integration.compare.run_result import Failure, RunResult, read_run
from integration.compare.runner import Outcome
from integration.systems import Degrees


class ParallelVerdict(StrEnum):
    """What a run comes to; native torch's is looked at and not judged."""

    SAME = "as one device"
    OUTSIDE = "outside tolerance"
    UNJUDGED = "no verdict"
    FAILED = "failed"
    UNCOMPARED = "not compared"

    @property
    def passes(self) -> bool:
        """Whether a comparison with this verdict in it can pass."""
        return self in (ParallelVerdict.SAME, ParallelVerdict.UNJUDGED)


@dataclass(frozen=True)
class ParallelResult:
    """One model, trained one way, with one thing random.

    Attributes:
        name: of its folder.
        way: how the way to train is called.
        native: whether no package of this repository takes part in it.
        work: absent when it failed.
        deviation: from one device; absent when either failed.
        final_loss: absent when it failed.
    """

    name: str
    model: str
    case: ParallelCase
    way: str
    ranks: int
    degrees: Degrees
    native: bool
    tolerance: float
    verdict: ParallelVerdict
    work: LocalWork | None
    deviation: Deviation | None
    final_loss: float | None
    failure: Failure | None


def passes(results: Sequence[ParallelResult]) -> bool:
    """Return whether every run finished and every plan's losses are one device's."""
    return all(result.verdict.passes for result in results)


def collect(jobs: Sequence[ParallelJob], outcomes: Sequence[Outcome]) -> list[ParallelResult]:
    """Read the run folders of ``jobs``; a reference that failed is a result, one that did not none.

    Returns:
        Results by model, way and case, in the order of the jobs.
    """
    runs = {job.job.name: read_run(outcome) for job, outcome in zip(jobs, outcomes, strict=True)}
    results = []
    for job in jobs:
        run = runs[job.job.name]
        if job.reference is not None:
            results.append(_result(job, run, runs[job.reference]))
        elif run.failure is not None:
            results.append(_result(job, run, run))
    return results


def _result(job: ParallelJob, run: RunResult, reference: RunResult) -> ParallelResult:
    found = None
    if run.summary is not None and reference.summary is not None:
        found = deviation(run.losses, reference.losses)
    native = job.source is Source.NATIVE
    return ParallelResult(
        name=job.job.name,
        model=job.model,
        case=job.case,
        way=job.variant.name,
        ranks=job.job.ranks,
        degrees=job.variant.degrees,
        native=native,
        tolerance=job.job.tolerance,
        verdict=_verdict(run, found, job.job.tolerance, native=native),
        work=None if run.summary is None else local_work(run.summary),
        deviation=found,
        final_loss=run.losses[-1] if run.summary is not None else None,
        failure=run.failure,
    )


def _verdict(
    run: RunResult, found: Deviation | None, tolerance: float, *, native: bool
) -> ParallelVerdict:
    if run.failure is not None:
        return ParallelVerdict.FAILED
    if found is None:
        return ParallelVerdict.UNCOMPARED
    if native:
        return ParallelVerdict.UNJUDGED
    return ParallelVerdict.SAME if found.within(tolerance) else ParallelVerdict.OUTSIDE
