"""Everything about a comparison that can be wrong before anything is deleted or started."""

from dataclasses import dataclass
from typing import Any

from integration.compare.folder import RUNS, require_replaceable
from integration.compare.job import Job, job_of, train_config
from integration.compare.optimizer_jobs import OptimizerJobs, optimizer_jobs
from integration.compare.options import CompareOptions
from integration.compare.parallel_jobs import ParallelJob, parallel_jobs
from integration.compare.picture_jobs import picture_jobs
from integration.compare.random_jobs import RandomJob, random_jobs
from integration.compare.variants import Variant, get_variant
from integration.data import (
    BatchLoader,
    BatchPlan,
    Modality,
    Samples,
    load_samples,
    require_source,
)
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
        optimizer_jobs: what runs after those; none where optimizers are left out.
        parallel_jobs: what runs after those; none where products of parallelism are left out.
        picture_jobs: what runs at last; none where pictures are left out.
    """

    options: CompareOptions
    jobs: tuple[Job, ...]
    random_jobs: tuple[RandomJob, ...]
    data: DataFacts
    optimizer_jobs: tuple[OptimizerJobs, ...] = ()
    parallel_jobs: tuple[ParallelJob, ...] = ()
    picture_jobs: tuple[Job, ...] = ()

    @property
    def all_jobs(self) -> tuple[Job, ...]:
        """Everything that runs, in order."""
        random = (each.job for each in self.random_jobs)
        optimizers = (job for each in self.optimizer_jobs for job in each.jobs)
        parallel = (each.job for each in self.parallel_jobs)
        return (*self.jobs, *random, *optimizers, *parallel, *self.picture_jobs)


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
    parallel = parallel_jobs(options)
    pictures = picture_jobs(options)
    require_replaceable(options.out, options.data)
    require_source(shape.modality, options.data)
    data = _samples(options, shape.modality)
    trained = {(variant.name, shape.modality) for variant in variants}
    trained |= {(each.variant.name, model_shape(each.model).modality) for each in parallel}
    kind = model_shape(options.optimizer_model).modality
    trained |= {(job.system, kind) for each in optimizers for job in each.jobs}
    others = {kind for _, kind in trained} - {shape.modality}
    sets = {shape.modality: data} | {kind: _samples(options, kind) for kind in others}
    for name, kind in sorted(trained):
        _require_enough_data(options, get_variant(name), sets[kind])
    jobs = [
        job_of(config, tolerance=variant.make().tolerance, name=variant.name)
        for variant, config in zip(variants, configs, strict=True)
    ]
    facts = DataFacts(data.source, data.size, data.fingerprint)
    return Comparison(options, tuple(jobs), random, facts, optimizers, parallel, pictures)


def _samples(options: CompareOptions, modality: Modality) -> Samples:
    path = options.data if modality is Modality.TEXT else None
    length = options.sequence_length
    return load_samples(modality, path, sequence_length=length, seed=options.seed)


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
        degree=variant.data_parallel_degree,
    )
    # Made only because its constructor knows how much a batch needs.
    BatchLoader(data, plan, rank=0, seed=options.seed)
