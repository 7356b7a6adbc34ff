"""The jobs that compare kinds of parallelism, and their products, on small models.

Each variant trains with weights drawn on the ranks' shards, with dropout, and with both (the two
cases of veScale, section 8, separately and together), and is compared with one device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from integration.compare.options import CompareOptions
from integration.compare.random_jobs import DROPOUT, Source
from integration.compare.results_folder import RUNS
from integration.compare.training_job import TrainingJob, make_job, train_config
from integration.compare.variants import NATIVE, PLAIN, PRODUCTS, REFERENCE, Variant, get_variant
from integration.models import model_shape

FOLDER = "parallel"


class ParallelCase(StrEnum):
    """What a run draws at random."""

    INIT = "init"
    DROPOUT = "dropout"
    BOTH = "both"
    NEITHER = "neither"

    @property
    def draws_weights(self) -> bool:
        """Whether ranks draw the weights on their shards."""
        return self in (ParallelCase.INIT, ParallelCase.BOTH)

    @property
    def drops_out(self) -> bool:
        """Whether the run has dropout."""
        return self in (ParallelCase.DROPOUT, ParallelCase.BOTH)


_RANDOM = (ParallelCase.INIT, ParallelCase.DROPOUT, ParallelCase.BOTH)


@dataclass(frozen=True)
class ParallelJob:
    """A job of this comparison.

    Attributes:
        model: name of the model.
        case: what is random.
        source: implementation that draws on shards; native runs are shown without a verdict.
        variant: system, ranks and degrees.
        job: the job; the name of its folder is unique.
        reference: name of the job that it is compared with; None for a reference.
    """

    model: str
    case: ParallelCase
    source: Source
    variant: Variant
    job: TrainingJob
    reference: str | None


def parallel_jobs(options: CompareOptions) -> tuple[ParallelJob, ...]:
    """Returns the jobs that ``options`` select, references first; empty with ``--no-parallelism``.

    Jobs with the same number of ranks and the same source share processes; native systems share
    processes in which no package of this repository is loaded.

    Raises:
        UsageError: a model or an option is invalid.
    """
    if not options.parallelism:
        return ()
    models = options.parallel_model_names()
    for model in models:
        model_shape(model)
    return (*_references(options, models), *_native(options, models), *_products(options, models))


def _references(options: CompareOptions, models: tuple[str, ...]) -> Iterator[ParallelJob]:
    for model in models:
        for case in ParallelCase:
            yield _job(options, model, case, Source.NATIVE, get_variant(REFERENCE), "whole", None)
            if case.draws_weights and model_shape(model).can_reinitialize:
                # Native systems draw with the model's initialiser, in its order.
                variant = get_variant(REFERENCE)
                yield _job(options, model, case, Source.NATIVE, variant, "sharded", None)


def _native(options: CompareOptions, models: tuple[str, ...]) -> Iterator[ParallelJob]:
    for model in models:
        shape = model_shape(model)
        for variant in NATIVE:
            if not variant.takes(shape):
                continue
            for case in _RANDOM:
                if case.draws_weights and not shape.can_reinitialize:
                    continue
                init = "sharded" if case.draws_weights else "whole"
                reference = f"{model}-{case}-{REFERENCE}" + "-redrawn" * case.draws_weights
                yield _job(options, model, case, Source.NATIVE, variant, init, reference)


def _products(options: CompareOptions, models: tuple[str, ...]) -> Iterator[ParallelJob]:
    for model in models:
        shape = model_shape(model)
        for variant in (each for each in PRODUCTS if each.takes(shape)):
            for case in _cases(options, variant):
                init = "sharded" if case.draws_weights else "whole"
                reference = f"{model}-{case}-{REFERENCE}"
                yield _job(options, model, case, Source.DIST_RNG, variant, init, reference)
        reference = f"{model}-{ParallelCase.NEITHER}-{REFERENCE}"
        for variant in (each for each in PLAIN if each.takes(shape)):
            yield _job(
                options, model, ParallelCase.NEITHER, Source.DIST_RNG, variant, "whole", reference
            )


def micro_batch(options: CompareOptions, variant: Variant) -> int:
    """Returns the samples of a rank's microbatch.

    Under a plan the microbatches of all data parallel ranks together have the size of one device's
    microbatch, so that dropout draws the same masks.
    """
    if variant.make().shards_batches:
        return max(1, options.micro_batch // variant.data_parallel_degree)
    return options.micro_batch


def _cases(options: CompareOptions, variant: Variant) -> tuple[ParallelCase, ...]:
    if not variant.drops_out:
        return (ParallelCase.INIT,)
    return _RANDOM if options.every_case or variant.ranks <= 2 else (ParallelCase.BOTH,)


def _job(
    options: CompareOptions,
    model: str,
    case: ParallelCase,
    source: Source,
    variant: Variant,
    init: str,
    reference: str | None,
) -> ParallelJob:
    redrawn = variant.name == REFERENCE and init == "sharded"
    name = f"{model}-{case}-{variant.name}" + "-redrawn" * redrawn
    choices: dict[str, Any] = variant.choices | {
        "out": options.out / RUNS / FOLDER / name,
        "model": model,
        "steps": options.parallel_steps,
        "micro_batch": micro_batch(options, variant),
        "init": init,
        "dropout": DROPOUT if case.drops_out else 0.0,
        # A run without random numbers needs no source.
        "random": (Source.NATIVE if case is ParallelCase.NEITHER else source).option,
    }
    config = train_config(options, choices, option_fields={"steps": "parallel_steps"})
    native = case is ParallelCase.NEITHER and variant.make().native
    job = make_job(
        config,
        tolerance=model_shape(model).tolerance,
        name=variant.name,
        session=f"{variant.ranks}-{Source.NATIVE if native else source}",
    )
    return ParallelJob(model, case, source, variant, job, reference)
