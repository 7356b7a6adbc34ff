"""Everything about a comparison that can be wrong before anything is deleted or started."""

from dataclasses import dataclass
from typing import Any

from integration.compare.folder import RUNS, require_replaceable
from integration.compare.job import Job, job_of, train_config
from integration.compare.optimizer_jobs import OptimizerJobs, optimizer_jobs
from integration.compare.options import CompareOptions
from integration.compare.random_jobs import RandomJob, random_jobs
from integration.data import BatchLoader, BatchPlan, Corpus, load_corpus
from integration.models import model_shape
from integration.systems import System, get_system
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
    systems = [get_system(name) for name in options.system_names()]
    configs = [_system_config(options, system) for system in systems]
    shape = model_shape(options.model)
    for system in systems:
        system.check(system.compare_ranks, shape)
    random = random_jobs(options)
    optimizers = optimizer_jobs(options)
    require_replaceable(options.out, options.data)
    corpus = load_corpus(options.data)
    for name in {job.system for each in optimizers for job in each.jobs}:
        _require_enough_data(options, get_system(name), corpus)
    for system in systems:
        _require_enough_data(options, system, corpus)
    jobs = [
        job_of(config, tolerance=system.tolerance)
        for system, config in zip(systems, configs, strict=True)
    ]
    facts = DataFacts(corpus.source, len(corpus.data), corpus.fingerprint)
    return Comparison(options, tuple(jobs), random, facts, optimizers)


def _system_config(options: CompareOptions, system: System) -> TrainConfig:
    choices: dict[str, Any] = {
        "system": system.name,
        "ranks": system.compare_ranks,
        "out": options.out / RUNS / system.name,
        "model": options.model,
        "steps": options.steps,
    }
    return train_config(options, choices)


def _require_enough_data(options: CompareOptions, system: System, corpus: Corpus) -> None:
    plan = BatchPlan(
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        degree=system.data_parallel_degree(system.compare_ranks),
        sequence_length=options.sequence_length,
    )
    # Made only because its constructor knows how much a batch needs.
    BatchLoader(corpus.data, plan, rank=0, seed=options.seed)
