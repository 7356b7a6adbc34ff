"""The jobs that compare block-wise and matrix optimizers under DDP and under fsdp."""

import importlib.util
from dataclasses import dataclass

from integration.compare.options import CompareOptions
from integration.compare.results_folder import RUNS
from integration.compare.training_job import TrainingJob, make_job, train_config
from integration.compare.variants import get_variant
from integration.errors import UsageError
from integration.models import model_shape
from integration.optimizers import ADAM_8BIT, MUON

FOLDER = "optimizers"
OPTIMIZERS = (ADAM_8BIT, MUON)
# DDP does not shard parameters, so that its ranks run the unsharded optimizer.
SYSTEMS = ("ddp", "fsdp")


@dataclass(frozen=True)
class OptimizerJobs:
    """The jobs with one optimizer; the first is the reference."""

    optimizer: str
    jobs: tuple[TrainingJob, ...]


def optimizer_jobs(options: CompareOptions) -> tuple[OptimizerJobs, ...]:
    """Returns the jobs that ``options`` select; an empty tuple with ``--no-optimizers``.

    Raises:
        UsageError: the model or an option is invalid, or fsdp is not installed.
    """
    if not options.optimizers:
        return ()
    model_shape(options.optimizer_model)
    if importlib.util.find_spec("fsdp") is None:
        raise UsageError(
            "the comparison of optimizers needs the package fsdp, which is not installed; install"
            " it, or leave the comparison out with --no-optimizers"
        )
    return tuple(
        OptimizerJobs(optimizer, tuple(_job(options, optimizer, system) for system in SYSTEMS))
        for optimizer in OPTIMIZERS
    )


def _job(options: CompareOptions, optimizer: str, name: str) -> TrainingJob:
    variant = get_variant(name)
    choices = variant.choices | {
        "out": options.out / RUNS / FOLDER / f"{optimizer}-{name}",
        "model": options.optimizer_model,
        "steps": options.optimizer_steps,
        "optimizer": optimizer,
    }
    config = train_config(options, choices, option_fields={"steps": "optimizer_steps"})
    tolerance = model_shape(options.optimizer_model).tolerance
    return make_job(config, tolerance=tolerance, session=FOLDER)
