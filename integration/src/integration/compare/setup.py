"""Everything about a comparison that can be wrong before anything is deleted or started."""

from dataclasses import dataclass
from typing import Any

from integration.compare.folder import RUNS, require_replaceable
from integration.compare.job import Job, job_of, train_config
from integration.compare.optimizer_jobs import OptimizerJobs, optimizer_jobs
from integration.compare.options import CompareOptions
from integration.compare.random_jobs import RandomJob, random_jobs
from integration.compare.variants import Variant, get_variant
from integration.data import BatchLoader, BatchPlan, Samples, load_samples
from integration.models import model_shape
from integration.train.config import TrainConfig


@dataclass(frozen=True)
class DataFacts:
    """The training text, for the report: where it came from, its bytes, their SHA-256."""

    source: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class Comparison:
    """A comparison that was found to make sense.

    Attributes:
        jobs: one per system; the first is the reference.
        random_jobs: what runs after them; none where random numbers are left out.
        optimizer_jobs: what runs at last; none where optimizers are left out.
    """

    options: CompareOptions
    jobs: tuple[Job, ...]
    random_jobs: tuple[RandomJob, ...]
    data: DataFacts
    optimizer_jobs: tuple[OptimizerJobs, ...] = ()

    @property
    def all_jobs(self) -> tuple[Job, ...]:
        """Everything that runs, in order."""
        random = (each.job for each in self.random_jobs)
        return (*self.jobs, *random, *(job for each in self.optimizer_jobs for job in each.jobs))


def prepare(options: CompareOptions) -> Comparison:
    """Check ``options``, reading only; nothing is written.

    Raises:
        UsageError: a system, model, number or path does not do.
    """
    variants = [get_variant(name) for name in options.system_names()]
    configs = [_config(options, variant) for variant in variants]
    shape = model_shape(options.model)
    for variant in variants:
        variant.make().check(variant.ranks, shape)
    random = random_jobs(options)
    optimizers = optimizer_jobs(options)
    require_replaceable(options.out, options.data)
    data = load_samples(
        shape.modality, options.data, sequence_length=options.sequence_length, seed=options.seed
    )
    for name in {job.system for each in optimizers for job in each.jobs}:
        _require_enough_data(options, get_variant(name), data)
    for variant in variants:
        _require_enough_data(options, variant, data)
    jobs = [
        job_of(config, tolerance=variant.make().tolerance, name=variant.name)
        for variant, config in zip(variants, configs, strict=True)
    ]
    facts = DataFacts(data.source, data.size, data.fingerprint)
    return Comparison(options, tuple(jobs), random, facts, optimizers)


def _config(options: CompareOptions, variant: Variant) -> TrainConfig:
    choices: dict[str, Any] = variant.choices | {
        "out": options.out / RUNS / variant.name,
        "model": options.model,
        "steps": options.steps,
    }
    return train_config(options, choices)


def _require_enough_data(options: CompareOptions, variant: Variant, data: Samples) -> None:
    plan = BatchPlan(
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        degree=variant.make().data_parallel_degree(variant.ranks),
    )
    # Made only because its constructor knows how much a batch needs.
    BatchLoader(data, plan, rank=0, seed=options.seed)
