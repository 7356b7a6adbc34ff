"""Validates a comparison before anything is deleted or started."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from integration.compare.experiment import Experiment, Setting
from integration.compare.options import CompareOptions
from integration.compare.results_folder import require_replaceable
from integration.compare.run import Run, TrainingJob
from integration.data import BatchLoader, BatchPlan, Modality, load_samples, require_source
from integration.models import model_shape


@dataclass(frozen=True)
class DataFacts:
    """A training set in the report: its source, its size in bytes and its SHA-256."""

    source: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class PreparedExperiment:
    """An experiment with its validated options and runs."""

    experiment: Experiment[Any]
    setting: Setting[Any]
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Comparison:
    """A validated comparison.

    Attributes:
        experiments: the experiments in the order of execution.
        data: the training sets of the runs.
    """

    options: CompareOptions
    experiments: tuple[PreparedExperiment, ...]
    data: tuple[DataFacts, ...]

    @property
    def jobs(self) -> tuple[TrainingJob, ...]:
        """The job of every run, in the order of execution."""
        return tuple(run.job for each in self.experiments for run in each.runs)


def prepare(options: CompareOptions) -> Comparison:
    """Validates ``options``; nothing is written.

    Raises:
        UsageError: a system, model, option or path is invalid.
    """
    prepared = []
    for experiment in options.selected():
        setting = experiment.setting(options.shared, options.options_of(experiment))
        prepared.append(PreparedExperiment(experiment, setting, tuple(experiment.runs(setting))))
    require_replaceable(options.out, options.shared.data)
    jobs = [run.job for each in prepared for run in each.runs]
    return Comparison(options, tuple(prepared), _require_data(options, jobs))


def _require_data(options: CompareOptions, jobs: Sequence[TrainingJob]) -> tuple[DataFacts, ...]:
    """Returns the training sets of the jobs, of which each has enough samples for its batches."""
    plans: dict[Modality, dict[BatchPlan, None]] = {}
    for job in jobs:
        config = job.config
        plan = BatchPlan(config.global_batch, config.micro_batch, job.data_parallel_degree)
        plans.setdefault(model_shape(job.model).modality, {})[plan] = None
    facts = []
    for modality, of_modality in plans.items():
        path = options.shared.data if modality is Modality.TEXT else None
        require_source(modality, path)
        length, seed = options.shared.sequence_length, options.shared.seed
        samples = load_samples(modality, path, sequence_length=length, seed=seed)
        for plan in of_modality:
            BatchLoader(samples, plan, rank=0, seed=seed)  # refuses too little data
        facts.append(DataFacts(samples.source, samples.size, samples.fingerprint))
    return tuple(facts)
