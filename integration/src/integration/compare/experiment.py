"""An experiment of the comparison: its options, its runs, and its sections of the report.

An experiment is a module of ``integration.compare.experiments`` with an `Experiment` named
``EXPERIMENT``; nothing else has to be changed to add one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from integration.compare.result import Result
from integration.compare.results_folder import RUNS
from integration.compare.run import Run, TrainingJob, option_name
from integration.data import Modality
from integration.device import DeviceOption
from integration.errors import UsageError
from integration.models import model_shape
from integration.report.section import Section
from integration.train.config import NEVER_RESUME, TrainConfig

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class SharedOptions:
    """The options of the runs of every experiment; values are checked by ``setup.prepare``."""

    out: Path = Path("integration-results")
    """Folder of the results: new, empty, or of an earlier comparison, which is replaced."""
    data: Path | None = None
    """File or folder to train on; by default the Python standard library's sources."""
    global_batch: int = 8
    """Sequences per optimizer step, the same for every system."""
    micro_batch: int = 4
    """Sequences of a microbatch on one rank."""
    sequence_length: int = 64
    """Tokens (bytes) per sequence."""
    learning_rate: float = 3e-4
    """Learning rate of the optimizers. The smaller it is, the later rounding changes which expert
    Mixtral's router selects for a token, which changes the loss visibly."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    device: DeviceOption = "auto"
    """Device of every run: auto (the machine's accelerator, or the CPU), cpu, cuda, or sim, which
    is testkit's simulated accelerator."""
    threads: int = 1
    """CPU threads per rank."""
    timeout: float = 300.0
    """Timeout of collectives, in seconds."""


@dataclass(frozen=True)
class Setting(Generic[OptionsT]):
    """What an experiment makes its runs from.

    Attributes:
        experiment: its name.
        prefix: prefix of its options on the command line; empty: none.
        shared: the options of all runs.
        own: its own options.
    """

    experiment: str
    prefix: str
    shared: SharedOptions
    own: OptionsT

    def option(self, field: str) -> str:
        """Returns the command-line option of one of its own fields."""
        return option_name(field, self.prefix)

    def require_generator(self) -> None:
        """Checks that the device has a generator whose numbers dist-rng and DTensor can place.

        Raises:
            UsageError: it is the simulated accelerator.
        """
        if self.shared.device == "sim":
            raise UsageError(
                f"--device sim: {self.experiment} draws weights and dropout on the ranks, expected "
                f"a device whose generator is known, got the simulated one; leave "
                f"{self.experiment} out of --experiments, or use --device cpu"
            )

    def job(
        self,
        name: str,
        choices: Mapping[str, Any],
        *,
        system: str | None = None,
        session: str | None = None,
    ) -> TrainingJob:
        """Returns a job, whose configuration is validated by the types of its fields.

        Args:
            name: name of its folder, unique in the experiment.
            choices: fields of ``TrainConfig`` besides the shared options, which they override.
            system: name of the system in the report; None: its name in ``choices``.
            session: see `TrainingJob`.

        Raises:
            UsageError: names the invalid option.
        """
        values: dict[str, Any] = vars(self.shared) | {
            "out": self.shared.out / RUNS / self.experiment / name,
            "resume": NEVER_RESUME,
            "checkpoint_every": 0,
            "final_checkpoint": False,
            "tensorboard": False,
            **choices,
        }
        if model_shape(values["model"]).modality is not Modality.TEXT:  # its data has no options
            del values["data"], values["sequence_length"]
        try:
            config = TrainConfig(**values)
        except ValidationError as error:
            raise self._usage_error(error) from error
        return TrainingJob(system or config.system, config, session)

    def _usage_error(self, error: ValidationError) -> UsageError:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        is_own = name in (each.name for each in fields(self.own))  # type: ignore[arg-type]
        option = self.option(name) if is_own else option_name(name)
        requirement = problem["msg"].removeprefix("Input ")
        return UsageError(f"{option} is {problem['input']}; it {requirement}")


@dataclass(frozen=True)
class Findings:
    """What an experiment reports.

    Attributes:
        sections: its sections of the report, with its rows of the table of verdicts.
        numbers: numbers for results.json that no run has.
    """

    sections: Sequence[Section]
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment(Generic[OptionsT]):
    """An experiment.

    Attributes:
        name: its name on the command line and in results.json; the name of its folder of runs.
        order: experiments run and are reported by rising order.
        quick: its options by default, an instance of a frozen dataclass with documented fields.
        full: its options by default in the profile ``full``.
        runs: returns its runs, each reference before the runs that are compared with it; raises
            `UsageError` for invalid options, and writes nothing.
        report: returns its findings from the results of its runs, in their order.
        prefix: prefix of its options on the command line; None: its name.
    """

    name: str
    order: float
    quick: OptionsT
    full: OptionsT
    runs: Callable[[Setting[OptionsT]], Iterable[Run]]
    report: Callable[[Setting[OptionsT], Sequence[Result]], Findings]
    prefix: str | None = None

    @property
    def option_prefix(self) -> str:
        """The prefix of its options."""
        return self.name if self.prefix is None else self.prefix

    def setting(self, shared: SharedOptions, own: OptionsT) -> Setting[OptionsT]:
        """Returns what its runs are made from."""
        return Setting(self.name, self.option_prefix, shared, own)
