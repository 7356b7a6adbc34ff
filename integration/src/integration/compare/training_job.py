"""Describes one run that the comparison starts, and the trainer's configuration for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from integration.compare.options import CompareOptions, option_arguments, option_name
from integration.data import Modality
from integration.errors import UsageError
from integration.models import model_shape
from integration.train.config import NEVER_RESUME, TrainConfig

_SAME_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class TrainingJob:
    """One run of the trainer.

    Attributes:
        ranks: number of processes.
        tolerance: largest accepted difference, absolute, in units of the loss.
        folder: run folder to write.
        log: file for standard output and standard error.
        arguments: command-line arguments of ``python -m integration.train``.
        session: jobs with the same session share processes; None: the job has its own.
        model: name of the model; jobs of one model are compared with each other.
    """

    system: str
    ranks: int
    tolerance: float
    steps: int
    folder: Path
    log: Path
    arguments: tuple[str, ...]
    session: str | None = None
    model: str = ""

    @property
    def name(self) -> str:
        """The name of its folder, which is unique among the jobs."""
        return self.folder.name


def train_config(
    options: CompareOptions,
    choices: Mapping[str, Any],
    option_fields: Mapping[str, str] = _SAME_NAMES,
) -> TrainConfig:
    """Returns the trainer's configuration of a run, validated by the types of its fields.

    Args:
        options: options of the comparison: batches, data and optimizer of every run.
        choices: fields of ``TrainConfig`` that are specific to this run.
        option_fields: the comparison's field by the trainer's field, where the names differ.

    Raises:
        UsageError: names the invalid option.
    """
    fields: dict[str, Any] = {
        "data": options.data,
        "global_batch": options.global_batch,
        "micro_batch": options.micro_batch,
        "sequence_length": options.sequence_length,
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "seed": options.seed,
        "threads": options.threads,
        "timeout": options.timeout,
        "resume": NEVER_RESUME,
        "checkpoint_every": 0,
        "final_checkpoint": False,
        "tensorboard": False,
        **choices,
    }
    if model_shape(fields["model"]).modality is not Modality.TEXT:  # its data has no options
        del fields["data"], fields["sequence_length"]
    try:
        return TrainConfig(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        option = option_name(option_fields.get(field, field))
        requirement = problem["msg"].removeprefix("Input ")
        raise UsageError(f"{option} is {problem['input']}; it {requirement}") from error


def make_job(
    config: TrainConfig, *, tolerance: float, name: str | None = None, session: str | None = None
) -> TrainingJob:
    """Returns the job that runs ``config``, which has a number of ranks.

    Args:
        config: the trainer's configuration.
        tolerance: see `TrainingJob`.
        name: name of the system in the report; None: its name in ``config``.
        session: see `TrainingJob`.
    """
    assert config.ranks is not None
    return TrainingJob(
        system=name or config.system,
        ranks=config.ranks,
        tolerance=tolerance,
        steps=config.steps,
        folder=config.out,
        log=config.out.with_suffix(".log"),
        arguments=tuple(option_arguments(vars(config))),
        session=session,
        model=config.model,
    )
