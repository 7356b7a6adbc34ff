"""Validates a comparison before anything is deleted or started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from integration.compare.cost import WARM_UP_STEPS
from integration.compare.diffusion_jobs import diffusion_jobs
from integration.compare.optimizer_jobs import OptimizerJobs, optimizer_jobs
from integration.compare.options import CompareOptions
from integration.compare.parallel_jobs import ParallelJob, micro_batch, parallel_jobs
from integration.compare.random_jobs import RandomJob, random_jobs
from integration.compare.results_folder import RUNS, require_replaceable
from integration.compare.training_job import TrainingJob, make_job, train_config
from integration.compare.variants import REFERENCE, Variant, get_variant
from integration.data import (
    BatchLoader,
    BatchPlan,
    Modality,
    Samples,
    load_samples,
    require_source,
)
from integration.errors import UsageError
from integration.models import model_shape


@dataclass(frozen=True)
class DataFacts:
    """A training set in the report: its source, its size in bytes and its SHA-256."""

    source: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class Comparison:
    """A validated comparison; jobs run in the order of the fields.

    Attributes:
        jobs: one per system and model; the first of a model is its reference.
        random_jobs: jobs of the comparison of random numbers, if any.
        data: the training sets of ``jobs``.
        optimizer_jobs: jobs of the comparison of optimizers, if any.
        parallel_jobs: jobs of the comparison of parallelism, if any.
        diffusion_jobs: jobs of the diffusion comparison, if any.
        missing: requested systems that cannot run here, with the reason.
    """

    options: CompareOptions
    jobs: tuple[TrainingJob, ...]
    random_jobs: tuple[RandomJob, ...]
    data: tuple[DataFacts, ...]
    optimizer_jobs: tuple[OptimizerJobs, ...] = ()
    parallel_jobs: tuple[ParallelJob, ...] = ()
    diffusion_jobs: tuple[TrainingJob, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_jobs(self) -> tuple[TrainingJob, ...]:
        """Every job, in the order of execution."""
        random = (each.job for each in self.random_jobs)
        optimizers = (job for each in self.optimizer_jobs for job in each.jobs)
        parallel = (each.job for each in self.parallel_jobs)
        return (*self.jobs, *random, *optimizers, *parallel, *self.diffusion_jobs)


def prepare(options: CompareOptions) -> Comparison:
    """Validates ``options``; nothing is written.

    Raises:
        UsageError: a system, model, option or path is invalid.
    """
    requested = [get_variant(name) for name in options.system_names()]
    missing = {each.name: why for each in requested if (why := each.make().missing)}
    pairs = _system_model_pairs(options, [each for each in requested if each.name not in missing])
    jobs = tuple(_job(options, variant, model) for variant, model in pairs)
    random = random_jobs(options)
    optimizers = optimizer_jobs(options)
    parallel = parallel_jobs(options)
    diffusion = diffusion_jobs(options)
    require_replaceable(options.out, options.data)
    trained = {(variant.name, model_shape(model).modality) for variant, model in pairs}
    shown = list(dict.fromkeys(model_shape(model).modality for _, model in pairs))
    kind = model_shape(options.optimizer_model).modality
    trained |= {(job.system, kind) for each in optimizers for job in each.jobs}
    batches = {(name, kind, options.micro_batch) for name, kind in trained}
    batches |= {
        (each.variant.name, model_shape(each.model).modality, micro_batch(options, each.variant))
        for each in parallel
    }
    sets = {kind: _samples(options, kind) for kind in {kind for _, kind, _ in batches}}
    for name, kind, samples in sorted(batches):
        _require_enough_data(options, get_variant(name), sets[kind], samples)
    facts = tuple(
        DataFacts(sets[kind].source, sets[kind].size, sets[kind].fingerprint) for kind in shown
    )
    return Comparison(options, jobs, random, facts, optimizers, parallel, diffusion, missing)


def _system_model_pairs(
    options: CompareOptions, variants: Sequence[Variant]
) -> list[tuple[Variant, str]]:
    """Returns pairs of systems and models, grouped by system, as its models share processes."""
    models = {name: model_shape(name) for name in options.model_names()}
    pairs = [(each, name) for each in variants for name in models if each.takes(models[name])]
    for variant in variants:
        if variant not in (each for each, _ in pairs):
            raise UsageError(
                f"system {variant.name!r} supports none of --models {options.models}; leave it"
                " out, or add a model that it supports"
            )
    for name in models:
        if [each.name for each, model in pairs if model == name] == [REFERENCE]:
            raise UsageError(
                f"no system of --systems {options.systems} but the single device supports model"
                f" {name!r}; leave the model out, or add a system that supports it"
            )
    for variant, name in pairs:
        variant.make().check(variant.ranks, models[name])
    return pairs


def _samples(options: CompareOptions, modality: Modality) -> Samples:
    path = options.data if modality is Modality.TEXT else None
    require_source(modality, path)
    length = options.sequence_length
    return load_samples(modality, path, sequence_length=length, seed=options.seed)


def _job(options: CompareOptions, variant: Variant, model: str) -> TrainingJob:
    shape = model_shape(model)
    choices: dict[str, Any] = variant.choices | {
        "out": options.out / RUNS / f"{model}-{variant.name}",
        "model": model,
        "steps": options.steps,
        "warmup_steps": min(options.warmup_steps, options.steps // 2),
    }
    if options.steps > WARM_UP_STEPS:  # the last step whose time is not measured
        choices["count_collectives"] = WARM_UP_STEPS
    config = train_config(options, choices)
    session = variant.name if options.share_processes else None
    return make_job(config, tolerance=shape.tolerance, name=variant.name, session=session)


def _require_enough_data(
    options: CompareOptions, variant: Variant, data: Samples, samples: int
) -> None:
    plan = BatchPlan(
        global_batch=options.global_batch,
        micro_batch=samples,
        degree=variant.data_parallel_degree,
    )
    # Its constructor refuses too little data.
    BatchLoader(data, plan, rank=0, seed=options.seed)
