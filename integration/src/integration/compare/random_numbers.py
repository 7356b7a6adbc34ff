"""Collects the results of the comparison of random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from integration.compare.deviation import Deviation, deviation
from integration.compare.random_jobs import RandomCase, RandomJob, Source
from integration.compare.run_result import Failure, RunResult, read_run
from integration.compare.runner import Outcome
from integration.metrics import RunSummary, StepRecord


class RandomVerdict(StrEnum):
    """The verdict on a run; native DTensor gets none."""

    REFERENCE = "reference"
    SAME = "same numbers"
    OTHER = "other numbers"
    OUTSIDE = "outside tolerance"
    UNJUDGED = "no verdict"
    FAILED = "failed"
    UNCOMPARED = "not compared"

    @property
    def passes(self) -> bool:
        """Whether a comparison with this verdict in it can pass."""
        return self in (RandomVerdict.REFERENCE, RandomVerdict.SAME, RandomVerdict.UNJUDGED)


@dataclass(frozen=True)
class RandomResult:
    """The result of one run of a case.

    Attributes:
        name: name of its folder.
        source: implementation that drew the random numbers on shards.
        same_weights: whether its initial weights equal the reference's, bit for bit; None for the
            reference, or if either run failed.
        same_masks: the same for the dropout masks of the first step; None also without dropout.
        deviation: None for the reference, or if either run failed.
        summary: None if the run failed.
    """

    case: RandomCase
    source: Source
    name: str
    system: str
    ranks: int
    tolerance: float
    verdict: RandomVerdict
    same_weights: bool | None
    same_masks: bool | None
    deviation: Deviation | None
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    failure: Failure | None


def passes(results: Sequence[RandomResult]) -> bool:
    """Returns whether every run finished and those with dist-rng have one device's numbers."""
    return all(result.verdict.passes for result in results)


def collect(jobs: Sequence[RandomJob], outcomes: Sequence[Outcome]) -> list[RandomResult]:
    """Reads the run folders of ``jobs`` and compares each run with the first of its case."""
    pairs = zip(jobs, outcomes, strict=True)
    results: list[RandomResult] = []
    for _, of_case in groupby(pairs, key=lambda pair: pair[0].case):
        runs = [(job, read_run(outcome)) for job, outcome in of_case]
        _, reference = runs[0]
        results += [_against(job, run, reference) for job, run in runs]
    return results


def _against(job: RandomJob, run: RunResult, reference: RunResult) -> RandomResult:
    same_weights: bool | None = None
    same_masks: bool | None = None
    found: Deviation | None = None
    if run is not reference and run.summary is not None and reference.summary is not None:
        own, one_device = run.summary, reference.summary
        same_weights = _same(own.initial_weights, one_device.initial_weights)
        if job.case is RandomCase.DROPOUT:
            same_masks = _same(own.first_masks, one_device.first_masks)
        found = deviation(run.losses, reference.losses)
    return RandomResult(
        case=job.case,
        source=job.source,
        name=job.job.name,
        system=job.job.system,
        ranks=job.job.ranks,
        tolerance=job.job.tolerance,
        verdict=_verdict(
            job, run, found, same=False not in (same_weights, same_masks), first=run is reference
        ),
        same_weights=same_weights,
        same_masks=same_masks,
        deviation=found,
        records=run.records,
        summary=run.summary,
        failure=run.failure,
    )


def _same(own: str | None, reference: str | None) -> bool:
    # Two missing hashes do not count as equal.
    return own is not None and own == reference


def _verdict(
    job: RandomJob, run: RunResult, found: Deviation | None, *, same: bool, first: bool
) -> RandomVerdict:
    if run.failure is not None:
        return RandomVerdict.FAILED
    if first:
        return RandomVerdict.REFERENCE
    if found is None:
        return RandomVerdict.UNCOMPARED
    if job.source is Source.NATIVE:
        return RandomVerdict.UNJUDGED
    if not same:
        return RandomVerdict.OTHER
    return RandomVerdict.SAME if found.within(job.job.tolerance) else RandomVerdict.OUTSIDE
