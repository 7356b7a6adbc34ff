"""Everything about a comparison that can be wrong before anything is deleted or started."""

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
    """Training data, for the report: where they came from, their bytes, and the bytes' SHA-256."""

    source: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class Comparison:
    """A comparison that was found to make sense.

    Attributes:
        jobs: one per system and model; the first of a model is its reference.
        random_jobs: what runs after them; none where random numbers are left out.
        optimizer_jobs: what runs after those; none where optimizers are left out.
        data: of every kind that the jobs train on.
        parallel_jobs: what runs after those; none where products of parallelism are left out.
        diffusion_jobs: what runs at last; none where pictures are left out.
        missing: why systems that were asked for have no jobs here, by their names.
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
        """Everything that runs, in order."""
        random = (each.job for each in self.random_jobs)
        optimizers = (job for each in self.optimizer_jobs for job in each.jobs)
        parallel = (each.job for each in self.parallel_jobs)
        return (*self.jobs, *random, *optimizers, *parallel, *self.diffusion_jobs)


def prepare(options: CompareOptions) -> Comparison:
    """Check ``options``, reading only; nothing is written.

    Raises:
        UsageError: a system, model, number or path does not do.
    """
    asked = [get_variant(name) for name in options.system_names()]
    missing = {each.name: why for each in asked if (why := each.make().missing)}
    trains = _system_model_pairs(options, [each for each in asked if each.name not in missing])
    jobs = tuple(_job(options, variant, model) for variant, model in trains)
    random = random_jobs(options)
    optimizers = optimizer_jobs(options)
    parallel = parallel_jobs(options)
    diffusion = diffusion_jobs(options)
    require_replaceable(options.out, options.data)
    trained = {(variant.name, model_shape(model).modality) for variant, model in trains}
    shown = list(dict.fromkeys(model_shape(model).modality for _, model in trains))
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
    """Pairs of systems and models; those of a system, which share processes, come together."""
    models = {name: model_shape(name) for name in options.model_names()}
    pairs = [(each, name) for each in variants for name in models if each.takes(models[name])]
    for variant in variants:
        if variant not in (each for each, _ in pairs):
            raise UsageError(
                f"system {variant.name!r} trains none of --models {options.models}; leave it out,"
                " or add a model that it trains"
            )
    for name in models:
        if [each.name for each, model in pairs if model == name] == [REFERENCE]:
            raise UsageError(
                f"no system of --systems {options.systems} trains model {name!r} beside the single"
                " device; leave it out, or add one that does"
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
    if options.steps > WARM_UP_STEPS:  # the last step whose time does not count
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
    # Made only because its constructor knows how much a batch needs.
    BatchLoader(data, plan, rank=0, seed=options.seed)
