"""One run that the comparison starts, and what the trainer is told for it."""

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

_AS_THE_TRAINER: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class TrainingJob:
    """One run of the trainer.

    Attributes:
        ranks: processes that it trains on.
        tolerance: the largest difference accepted, absolute, in units of the loss.
        folder: the run folder that it writes.
        log: the file for its standard output and error.
        arguments: of ``python -m integration.train``.
        session: jobs of one name run in the same processes, on the same ranks; None: alone.
        model: that it trains; jobs of one model are compared with each other.
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
        """What tells it from the other jobs: the name of its folder."""
        return self.folder.name


def train_config(
    options: CompareOptions,
    choices: Mapping[str, Any],
    spelled: Mapping[str, str] = _AS_THE_TRAINER,
) -> TrainConfig:
    """Return what the trainer will be told; its own types check the numbers.

    Args:
        options: of the comparison, from which every run takes its batches, data and optimizer.
        choices: fields of ``TrainConfig`` that this run has for itself.
        spelled: the comparison's field for a choice, where it has another name than the trainer's.

    Raises:
        UsageError: naming the option that does not do.
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
    if model_shape(fields["model"]).modality is not Modality.TEXT:  # which has data of its own
        del fields["data"], fields["sequence_length"]
    try:
        return TrainConfig(**fields)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0])
        option = option_name(spelled.get(field, field))
        wanted = problem["msg"].removeprefix("Input ")
        raise UsageError(f"{option} is {problem['input']}; it {wanted}") from error


def make_job(
    config: TrainConfig, *, tolerance: float, name: str | None = None, session: str | None = None
) -> TrainingJob:
    """Return the job that runs ``config``, whose ``ranks`` are given.

    Args:
        config: of the run.
        tolerance: as the job's.
        name: how its system is called; None: as the configuration calls it.
        session: as the job's.
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
