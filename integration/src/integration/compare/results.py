"""Collects the results of a comparison and writes results.json."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import Tensor

from integration.compare.cost import Cost, LocalWork, cost, local_work
from integration.compare.deviation import Deviation, deviation
from integration.compare.optimizer_jobs import OptimizerJobs
from integration.compare.parallelism import ParallelResult
from integration.compare.parallelism import passes as parallelism_passes
from integration.compare.random_numbers import RandomResult
from integration.compare.random_numbers import passes as random_numbers_pass
from integration.compare.run_result import Failure, RunResult, read_run
from integration.compare.runner import Outcome
from integration.metrics import RunSummary, StepRecord

RESULTS_FILE = "results.json"


class Verdict(StrEnum):
    """The verdict on a system's run."""

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
class SystemResult:
    """The result of one system with one model.

    Attributes:
        records: the recorded steps, also of a failed run.
        summary, work, cost: None if the run failed.
        deviation: None for the reference, or if either run failed.
        relative_step_time: ratio of the median step time to the reference's.
    """

    system: str
    model: str
    ranks: int
    tolerance: float
    verdict: Verdict
    records: tuple[StepRecord, ...]
    summary: RunSummary | None
    work: LocalWork | None
    cost: Cost | None
    deviation: Deviation | None
    relative_step_time: float | None
    failure: Failure | None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every recorded step."""
        return tuple(record.loss for record in self.records)


@dataclass(frozen=True)
class OptimizerResult:
    """The results with one optimizer, a system each, the reference first."""

    optimizer: str
    runs: Sequence[SystemResult]

    @property
    def reference(self) -> SystemResult:
        """The result that the others are compared with."""
        return self.runs[0]


@dataclass(frozen=True)
class GeneratedImages:
    """Images generated from the checkpoint of one run.

    Attributes:
        images: (samples * 10, 1, 8, 8) fp32 in [-1, 1], classes in turn.
        recognised: number of images whose nearest real image has the requested class.
    """

    system: str
    images: Tensor
    recognised: int


@dataclass(frozen=True)
class DiffusionResult:
    """The results of a DiT on one device and sharded, and the images that each generates.

    Attributes:
        runs: the reference first; deviation and verdict are of the first ``judged`` steps.
        whole: deviation over all steps, in which rounding is amplified; it has no verdict. None if
            a run failed.
        drawn: generated images of the runs that finished, in their order.
        samples: generated images per class.
        real: real images, as many and in the same order.
        difference: largest difference of a pixel between the runs, of a range of 2; it has no
            verdict. None if a run failed.
    """

    model: str
    runs: Sequence[SystemResult]
    judged: int
    whole: Deviation | None
    drawn: Sequence[GeneratedImages]
    samples: int
    real: Tensor
    difference: float | None

    def facts(self) -> dict[str, Any]:
        """Returns everything except the images, for results.json."""
        return {
            "model": self.model,
            "runs": [asdict(run) for run in self.runs],
            "pictures": len(self.real),
            "recognised": {drawn.system: drawn.recognised for drawn in self.drawn},
            "difference": self.difference,
            "judged_steps": self.judged,
            "whole": self.whole and asdict(self.whole),
        }


@dataclass(frozen=True)
class Results:
    """The results of a comparison; parts that the options leave out are empty or None.

    Attributes:
        systems: by model, the reference first.
        random_numbers: by case, the reference first.
        optimizers: by optimizer.
        parallelism: by model, variant and case.
        diffusion: the DiT and its generated images.
    """

    systems: Sequence[SystemResult]
    random_numbers: Sequence[RandomResult]
    optimizers: Sequence[OptimizerResult] = ()
    parallelism: Sequence[ParallelResult] = ()
    diffusion: DiffusionResult | None = None

    @property
    def passes(self) -> bool:
        """Whether everything that was compared passes."""
        optimizers_pass = all(passes(each.runs) for each in self.optimizers)
        others_pass = random_numbers_pass(self.random_numbers) and parallelism_passes(
            self.parallelism
        )
        diffusion_passes = self.diffusion is None or passes(self.diffusion.runs)
        return passes(self.systems) and optimizers_pass and others_pass and diffusion_passes

    @property
    def failures(self) -> list[Failure]:
        """The failed runs, in order."""
        found = [each.failure for each in self.systems]
        found += [each.failure for each in self.random_numbers]
        found += [run.failure for each in self.optimizers for run in each.runs]
        found += [each.failure for each in self.parallelism]
        found += [run.failure for run in self.diffusion.runs] if self.diffusion else []
        return [failure for failure in found if failure is not None]


def passes(results: Sequence[SystemResult]) -> bool:
    """Returns whether every run finished and every curve stayed within its tolerance."""
    return all(result.verdict.passes for result in results)


def collect(outcomes: Sequence[Outcome]) -> list[SystemResult]:
    """Reads the run folders and compares every curve with the first one of its model.

    Returns:
        Results by model, in the order of the runs.
    """
    runs = [read_run(outcome) for outcome in outcomes]
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(run.outcome.job.model, []).append(run)
    return [
        _compare(run, same[0], is_reference=run is same[0])
        for same in groups.values()
        for run in same
    ]


def by_model(results: Sequence[SystemResult]) -> dict[str, list[SystemResult]]:
    """Groups results by the name of their model, in order."""
    return {
        model: [each for each in results if each.model == model]
        for model in dict.fromkeys(each.model for each in results)
    }


def collect_optimizers(
    jobs: Sequence[OptimizerJobs], outcomes: Sequence[Outcome]
) -> list[OptimizerResult]:
    """Reads the run folders of ``jobs`` and compares each run with its optimizer's first one."""
    remaining = iter(outcomes)
    return [
        OptimizerResult(each.optimizer, collect([next(remaining) for _ in each.jobs]))
        for each in jobs
    ]


def write_results(path: Path, results: Results, about: dict[str, Any]) -> None:
    """Writes the results as JSON; numbers that are not finite become "nan", "inf" and "-inf"."""
    document = {
        "passes": results.passes,
        **about,
        "systems": [asdict(each) for each in results.systems],
        "random_numbers": [asdict(each) for each in results.random_numbers],
        "optimizers": [asdict(each) for each in results.optimizers],
        "parallelism": [asdict(each) for each in results.parallelism],
        "pictures": results.diffusion and results.diffusion.facts(),
    }
    path.write_text(json.dumps(_jsonable(document), indent=2, allow_nan=False) + "\n")


def _compare(run: RunResult, reference: RunResult, *, is_reference: bool) -> SystemResult:
    job = run.outcome.job
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
            found = deviation(run.losses, reference.losses)
    return SystemResult(
        system=job.system,
        model=job.model,
        ranks=job.ranks,
        tolerance=job.tolerance,
        verdict=_verdict(run, found, is_reference=is_reference),
        records=run.records,
        summary=run.summary,
        work=None if run.summary is None else local_work(run.summary),
        cost=own_cost,
        deviation=found,
        relative_step_time=relative,
        failure=run.failure,
    )


def _verdict(run: RunResult, found: Deviation | None, *, is_reference: bool) -> Verdict:
    if run.failure is not None:
        return Verdict.FAILED
    if is_reference:
        return Verdict.REFERENCE
    if found is None:
        return Verdict.UNCOMPARED
    if found.bitwise_equal:
        return Verdict.EQUAL
    return Verdict.WITHIN if found.within(run.outcome.job.tolerance) else Verdict.OUTSIDE


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value
