"""What the runs of a comparison come to, as data."""

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
class SystemResult:
    """One system's run with one model.

    Attributes:
        records: the steps that were written, also of a failed run.
        summary, work, cost: absent when the run failed.
        deviation: absent when it or the reference failed, and of the reference itself.
        relative_step_time: median step time over the reference's.
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
        """The loss of every step that was written."""
        return tuple(record.loss for record in self.records)


@dataclass(frozen=True)
class OptimizerResult:
    """The runs with one optimizer, the reference's first; each is of a system."""

    optimizer: str
    runs: Sequence[SystemResult]

    @property
    def reference(self) -> SystemResult:
        """What the others were compared with."""
        return self.runs[0]


@dataclass(frozen=True)
class GeneratedImages:
    """What one run draws.

    Attributes:
        images: (samples * 10, 1, 8, 8) fp32 in [-1, 1], classes in turn.
        recognised: how many of them are nearest to a real image of the class they were asked for.
    """

    system: str
    images: Tensor
    recognised: int


@dataclass(frozen=True)
class DiffusionResult:
    """The runs of one DiT and their pictures.

    Attributes:
        runs: the reference's first; the deviation and the verdict are of the ``judged`` steps.
        whole: the deviation over all steps, in which rounding has been amplified; not judged.
            Absent where a run has failed.
        drawn: of the runs that finished, in their order.
        samples: pictures of each class.
        real: images of the data, as many and in the same order.
        difference: the largest of a pixel between the runs, of a range of 2; not judged either,
            and absent where one has failed.
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
        """Return all but the pictures, for results.json."""
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
    """All that a comparison found.

    Attributes:
        systems: model by model, the reference's first.
        random_numbers: case by case, each one's reference first; empty where it was left out.
        optimizers: one after the other; empty where they were left out.
        parallelism: of every product; empty where they were left out.
        pictures: absent where they were left out.
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
        pictures_pass = self.diffusion is None or passes(self.diffusion.runs)
        return passes(self.systems) and optimizers_pass and others_pass and pictures_pass

    @property
    def failures(self) -> list[Failure]:
        """Why runs have no result, in the order of the runs."""
        found = [each.failure for each in self.systems]
        found += [each.failure for each in self.random_numbers]
        found += [run.failure for each in self.optimizers for run in each.runs]
        found += [each.failure for each in self.parallelism]
        found += [run.failure for run in self.diffusion.runs] if self.diffusion else []
        return [failure for failure in found if failure is not None]


def passes(results: Sequence[SystemResult]) -> bool:
    """Return whether every run finished and every curve stayed within its tolerance."""
    return all(result.verdict.passes for result in results)


def collect(outcomes: Sequence[Outcome]) -> list[SystemResult]:
    """Read the run folders and compare every curve with its model's first one.

    Returns:
        Results model by model, in the order of the runs.
    """
    runs = [read_run(outcome) for outcome in outcomes]
    by_model: dict[str, list[RunResult]] = {}
    for run in runs:
        by_model.setdefault(run.outcome.job.model, []).append(run)
    return [
        _against(run, same[0], is_reference=run is same[0])
        for same in by_model.values()
        for run in same
    ]


def of_models(results: Sequence[SystemResult]) -> dict[str, list[SystemResult]]:
    """Return the results of every model by its name, in their order."""
    return {
        model: [each for each in results if each.model == model]
        for model in dict.fromkeys(each.model for each in results)
    }


def collect_optimizers(
    jobs: Sequence[OptimizerJobs], outcomes: Sequence[Outcome]
) -> list[OptimizerResult]:
    """Read the run folders of ``jobs`` and compare each run with its optimizer's first one."""
    remaining = iter(outcomes)
    return [
        OptimizerResult(each.optimizer, collect([next(remaining) for _ in each.jobs]))
        for each in jobs
    ]


def write_results(path: Path, results: Results, about: dict[str, Any]) -> None:
    """Write everything as JSON; numbers that JSON lacks become "nan", "inf" and "-inf"."""
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


def _against(run: RunResult, reference: RunResult, *, is_reference: bool) -> SystemResult:
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
