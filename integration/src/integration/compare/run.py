"""A run that the comparison starts, and what its losses are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from integration.systems import get_system
from integration.train.config import TrainConfig, degrees_of


@dataclass(frozen=True)
class TrainingJob:
    """One run of the trainer.

    Attributes:
        system: name of the system in the report.
        config: the trainer's configuration, with a number of ranks.
        session: jobs with the same session share processes; None: the job has its own.
    """

    system: str
    config: TrainConfig
    session: str | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.config.model

    @property
    def ranks(self) -> int:
        """The number of processes."""
        assert self.config.ranks is not None
        return self.config.ranks

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return self.config.steps

    @property
    def folder(self) -> Path:
        """The run folder to write."""
        return self.config.out

    @property
    def log(self) -> Path:
        """The file for standard output and standard error."""
        return self.folder.with_suffix(".log")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The command-line arguments of ``python -m integration.train``."""
        return tuple(option_arguments(vars(self.config)))

    @property
    def data_parallel_degree(self) -> int:
        """The number of ranks with different data."""
        system = get_system(self.config.system, degrees_of(self.config))
        return system.data_parallel_degree(self.ranks // self.config.pp_degree)


@dataclass(frozen=True)
class Run:
    """A job of an experiment, and how its result is judged.

    Attributes:
        job: the job; the name of its folder is unique in the experiment.
        title: its name in sentences, such as "fsdp with llama-10m".
        tolerance: largest accepted difference from the reference, absolute, in units of the loss.
        reference: name of the job that it is compared with; None: it is a reference.
        judged: whether it has a verdict; others are shown beside those that have.
        equal: fields of the summary that must equal the reference's bit for bit, and the plural
            noun for each in sentences.
        first_steps: number of first steps whose losses decide; None: all.
        labels: what distinguishes it within the experiment, such as its case.
    """

    job: TrainingJob
    title: str
    tolerance: float
    reference: str | None = None
    judged: bool = True
    equal: Mapping[str, str] = field(default_factory=dict)
    first_steps: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


def option_arguments(values: Mapping[str, object], prefix: str = "") -> list[str]:
    """Returns fields and values as command-line arguments that tyro parses; None is left out."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(option_name(name if value else f"no_{name}", prefix))
        elif value is not None:
            words += [option_name(name, prefix), str(value)]
    return words


def option_name(name: str, prefix: str = "") -> str:
    """Returns the command-line option of a field of the options with this prefix."""
    return "--" + f"{prefix}.{name}".removeprefix(".").replace("_", "-")
