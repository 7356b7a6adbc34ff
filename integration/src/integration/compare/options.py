"""The command line of the comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

import tyro

from integration.compare.variants import REFERENCE, SYSTEMS, VARIANT_NAMES
from integration.errors import UsageError

_DESCRIPTION = """Train under every system and compare each with one device.

Trains the same models on the same global batches, one system after another; then a small model
whose weights or dropout masks are drawn on 2 and 4 ranks; then small models with fsdp's optimizers
under DDP and under fsdp, and by every kind of parallelism; then a DiT, which generates images.
Writes loss curves, step times and memory to OUT/report.md, OUT/report.html and OUT/results.json.
Exit code: 0 if every curve stays within its tolerance and dist-rng's random numbers are one
device's, 1 if not or if a run fails, 2 if the options are invalid. `full` before the options
selects the defaults of the full profile: more steps, separate processes for each run, and all three
cases on four ranks too; `quick`, the default, takes minutes."""


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison; values are checked by ``setup.prepare``."""

    systems: str = ",".join(variant.name for variant in SYSTEMS)
    """Systems to compare, separated by commas; 'single' always runs, and first."""
    out: Path = Path("integration-results")
    """Folder of the results: new, empty, or of an earlier comparison, which is replaced."""
    models: str = "llama-10m,mixtral-10m,dit-3m"
    """Models to train, separated by commas; ``python -m integration.train --help`` lists them."""
    data: Path | None = None
    """File or folder to train on; by default the Python standard library's sources."""
    steps: int = 12
    """Optimizer steps per system and model."""
    warmup_steps: int = 4
    """Steps of linear learning-rate warm-up, at most half of all steps."""
    share_processes: bool = True
    """Run the models of a system in the same processes, which saves time; the peak memory of later
    models then includes what earlier ones left allocated."""
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
    threads: int = 1
    """CPU threads per rank."""
    timeout: float = 300.0
    """Timeout of collectives, in seconds."""
    random_numbers: bool = True
    """Also compare random numbers that are drawn on shards."""
    random_model: str = "llama-tiny"
    """Model of the comparison of random numbers."""
    random_steps: int = 10
    """Optimizer steps of each run of that comparison."""
    parallelism: bool = True
    """Also compare every kind of parallelism and their products, by plans and natively in torch."""
    parallel_models: str = "llama-tiny,mixtral-tiny,dit-tiny"
    """Models of the comparison of parallelism, separated by commas."""
    parallel_steps: int = 6
    """Optimizer steps of each run of that comparison."""
    every_case: bool = False
    """On more than 2 ranks, compare random weights and dropout separately too; by default they are
    compared together only."""
    optimizers: bool = True
    """Also compare fsdp's optimizers under DDP and under fsdp."""
    optimizer_model: str = "llama-tiny"
    """Model of the comparison of optimizers."""
    optimizer_steps: int = 50
    """Optimizer steps of each run of that comparison."""
    diffusion: bool = True
    """Also compare the images that a DiT generates after training on one device and sharded."""
    diffusion_model: str = "dit-small"
    """Model of the comparison of generated images."""
    diffusion_steps: int = 450
    """Optimizer steps of each run of that comparison; digits need about the default number."""

    def system_names(self) -> tuple[str, ...]:
        """Returns the names of the variants: the reference, then the others in the given order.

        Raises:
            UsageError: there is none besides the reference.
        """
        names = [name.strip() for name in self.systems.split(",")]
        others = [name for name in dict.fromkeys(names) if name not in ("", REFERENCE)]
        if not others:
            choices = ", ".join(name for name in VARIANT_NAMES if name != REFERENCE)
            raise UsageError(
                f"--systems: expected a system to compare with the single device, got"
                f" {self.systems!r}; add one or more of: {choices}"
            )
        return (REFERENCE, *others)

    def model_names(self) -> tuple[str, ...]:
        """Returns the names of the models that every system trains.

        Raises:
            UsageError: there is none.
        """
        names = _names(self.models)
        if not names:
            raise UsageError(
                f"--models: expected the name of a model, got {self.models!r};"
                " python -m integration.train --help lists the models"
            )
        return names

    def parallel_model_names(self) -> tuple[str, ...]:
        """Returns the names of the models on which parallelism is compared."""
        return _names(self.parallel_models)

    def command_line(self) -> list[str]:
        """Returns every option explicitly, so that other defaults do not change the result."""
        return option_arguments({field.name: getattr(self, field.name) for field in fields(self)})


def _names(text: str) -> tuple[str, ...]:
    """Returns the distinct names of a comma-separated list, in order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


# Sets of defaults, selected by a word before the options.
PROFILES: Mapping[str, CompareOptions] = MappingProxyType(
    {
        "quick": CompareOptions(),
        "full": CompareOptions(
            steps=120,
            warmup_steps=20,
            share_processes=False,
            random_steps=60,
            parallel_steps=20,
            every_case=True,
            optimizer_steps=200,
        ),
    }
)


def option_name(field: str) -> str:
    """Returns the command-line option of a field."""
    return "--" + field.replace("_", "-")


def option_arguments(values: Mapping[str, object]) -> list[str]:
    """Returns fields and values as command-line arguments that tyro parses; None is left out."""
    words: list[str] = []
    for field, value in values.items():
        if isinstance(value, bool):
            words.append(option_name(field if value else f"no_{field}"))
        elif value is not None:
            words += [option_name(field), str(value)]
    return words


def parse_options(arguments: Sequence[str]) -> CompareOptions:
    """Parses ``arguments``, without the program's name: a profile, if any, then options.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    profile, rest = "quick", list(arguments)
    if rest and rest[0] in PROFILES:
        profile, *rest = rest
    return tyro.cli(
        CompareOptions,
        prog="python -m integration.compare [quick|full]",
        description=_DESCRIPTION,
        args=rest,
        default=PROFILES[profile],
    )
