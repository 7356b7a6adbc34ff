"""Everything about a comparison that can be wrong before anything is deleted or started."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from integration.compare.folder import RUNS, require_replaceable
from integration.compare.options import CompareOptions, option_of, option_words
from integration.data import BatchLoader, BatchPlan, Corpus, load_corpus
from integration.errors import UsageError
from integration.models import model_shape
from integration.systems import System, get_system
from integration.train.config import NEVER_RESUME, TrainConfig


@dataclass(frozen=True)
class Job:
    """One system's run.

    Attributes:
        ranks: processes that it trains on.
        tolerance: the largest difference accepted, absolute, in nats per token.
        folder: the run folder that it writes.
        log: the file for its standard output and error.
        arguments: of ``python -m integration.train``.
    """

    system: str
    ranks: int
    tolerance: float
    steps: int
    folder: Path
    log: Path
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class DataFacts:
    """The training text, for the report: where it came from, its bytes, their SHA-256."""

    source: str
    size: int
    fingerprint: str


@dataclass(frozen=True)
class Comparison:
    """A comparison that was found to make sense; the first job is the reference."""

    options: CompareOptions
    jobs: tuple[Job, ...]
    data: DataFacts


def prepare(options: CompareOptions) -> Comparison:
    """Check ``options``, reading only; nothing is written.

    Raises:
        UsageError: a system, model, number or path does not do.
    """
    systems = [get_system(name) for name in options.system_names()]
    configs = [_train_config(options, system) for system in systems]
    shape = model_shape(options.model)
    for system in systems:
        system.check(system.compare_ranks, shape)
    require_replaceable(options.out, options.data)
    corpus = load_corpus(options.data)
    for system in systems:
        _require_enough_data(options, system, corpus)
    jobs = [_job(system, config) for system, config in zip(systems, configs, strict=True)]
    facts = DataFacts(corpus.source, len(corpus.data), corpus.fingerprint)
    return Comparison(options, tuple(jobs), facts)


def _train_config(options: CompareOptions, system: System) -> TrainConfig:
    """Return what the trainer will be told; its own types check the numbers."""
    try:
        return TrainConfig(
            system=system.name,
            ranks=system.compare_ranks,
            out=options.out / RUNS / system.name,
            model=options.model,
            data=options.data,
            steps=options.steps,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            sequence_length=options.sequence_length,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            seed=options.seed,
            threads=options.threads,
            timeout=options.timeout,
            resume=NEVER_RESUME,
            checkpoint_every=0,
            tensorboard=False,
        )
    except ValidationError as error:
        problem = error.errors()[0]
        option = option_of(str(problem["loc"][0]))
        wanted = problem["msg"].removeprefix("Input ")
        raise UsageError(f"{option} is {problem['input']}; it {wanted}") from error


def _require_enough_data(options: CompareOptions, system: System, corpus: Corpus) -> None:
    plan = BatchPlan(
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        degree=system.data_parallel_degree(system.compare_ranks),
        sequence_length=options.sequence_length,
    )
    # Made only because its constructor knows how much a batch needs.
    BatchLoader(corpus.data, plan, rank=0, seed=options.seed)


def _job(system: System, config: TrainConfig) -> Job:
    return Job(
        system=system.name,
        ranks=system.compare_ranks,
        tolerance=system.tolerance,
        steps=config.steps,
        folder=config.out,
        log=config.out.with_suffix(".log"),
        arguments=tuple(option_words(vars(config))),
    )
