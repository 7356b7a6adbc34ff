"""Collects the results of the comparison of parallelism."""

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
    """The verdict on a run; native runs get none."""

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
    """The result of one model, variant and case.

    Attributes:
        name: name of its folder.
        way: name of the variant.
        native: whether torch's own DTensor drew the random numbers.
        work: None if the run failed.
        deviation: deviation from one device; None if either run failed.
        final_loss: None if the run failed.
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
    """Returns whether every run finished and the losses of every plan are one device's."""
    return all(result.verdict.passes for result in results)


def collect(jobs: Sequence[ParallelJob], outcomes: Sequence[Outcome]) -> list[ParallelResult]:
    """Reads the run folders of ``jobs``.

    Returns:
        A result for each job that has a reference, and for each reference that failed, in order.
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
