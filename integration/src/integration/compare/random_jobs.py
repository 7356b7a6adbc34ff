"""The jobs that compare random numbers: each case on one device, and sharded over 2 and 4 ranks."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from integration.compare.options import CompareOptions
from integration.compare.results_folder import RUNS
from integration.compare.training_job import TrainingJob, make_job, train_config
from integration.compare.variants import REFERENCE
from integration.errors import UsageError
from integration.models import model_shape
from integration.systems import get_system
from integration.train.config import DIST_RNG_RANDOM, NATIVE_RANDOM

FOLDER = "random"
PARALLEL = "dtensor-tp"
RANKS = (2, 4)
DROPOUT = 0.1
# The order of reductions alone gives 1.4e-6 over 20 steps, with equal weights on 2 ranks.
TOLERANCE = 1e-5


class RandomCase(StrEnum):
    """What a run draws on shards."""

    INIT = "init"
    DROPOUT = "dropout"


class Source(StrEnum):
    """The implementation that draws random numbers for DTensors: torch's own, or dist-rng's."""

    NATIVE = "native"
    DIST_RNG = "dist-rng"

    @property
    def option(self) -> str:
        """The value of the trainer's ``--random`` that selects it."""
        return NATIVE_RANDOM if self is Source.NATIVE else DIST_RNG_RANDOM


@dataclass(frozen=True)
class RandomJob:
    """A job of this comparison; the first of each case is the reference."""

    case: RandomCase
    source: Source
    job: TrainingJob


def random_jobs(options: CompareOptions) -> tuple[RandomJob, ...]:
    """Returns the jobs that ``options`` select, by case; empty with ``--no-random-numbers``.

    Jobs with the same number of ranks and the same source share processes.

    Raises:
        UsageError: the model or an option is invalid, or dist-rng is not installed.
    """
    if not options.random_numbers:
        return ()
    shape = model_shape(options.random_model)
    for ranks in RANKS:
        get_system(PARALLEL).check(ranks, shape)
    if importlib.util.find_spec("dist_rng") is None:
        raise UsageError(
            "the comparison of random numbers needs the package dist-rng, which is not installed;"
            " install it, or leave the comparison out with --no-random-numbers"
        )
    return tuple(job for case in RandomCase for job in _jobs(options, case))


def _jobs(options: CompareOptions, case: RandomCase) -> Iterator[RandomJob]:
    # The reference: one device, which draws with torch alone.
    yield _job(options, case, REFERENCE, 1, Source.NATIVE)
    for ranks in RANKS:
        for source in Source:
            yield _job(options, case, PARALLEL, ranks, source)


def _job(
    options: CompareOptions, case: RandomCase, system: str, ranks: int, source: Source
) -> RandomJob:
    name = f"{case}-{system}-{ranks}-{source}"
    choices: dict[str, Any] = {
        "system": system,
        "ranks": ranks,
        "out": options.out / RUNS / FOLDER / name,
        "model": options.random_model,
        "steps": options.random_steps,
        "init": "sharded" if case is RandomCase.INIT else "whole",
        "dropout": DROPOUT if case is RandomCase.DROPOUT else 0.0,
        "random": source.option,
        "fingerprint": True,
    }
    config = train_config(options, choices, option_fields={"steps": "random_steps"})
    return RandomJob(
        case, source, make_job(config, tolerance=TOLERANCE, session=f"{ranks}-{source}")
    )
