"""What a comparison is told on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

import tyro

from integration.compare.variants import REFERENCE, SYSTEMS, VARIANT_NAMES
from integration.errors import UsageError

_DESCRIPTION = """Train under every system and compare each with one device.

Trains the same models on the same global batches, one system after another; then, for the random
numbers, a small one whose weights or dropout are drawn on 2 and 4 ranks; then a small one with
fsdp's optimizers, under DDP and sharded; then a DiT, whose pictures are drawn. Writes loss curves,
speeds and memory to OUT/report.md, OUT/report.html and OUT/results.json. Exit code: 0 when every
curve stays within its tolerance and dist-rng's random numbers are one device's, 1 when not or when
a run fails, 2 when the options are wrong. With `full` before the options their defaults are those
of the full profile: more steps, a process for each run, and all three cases on four ranks too;
`quick`, the default, takes minutes."""


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison; values are checked by ``setup.prepare``."""

    systems: str = ",".join(variant.name for variant in SYSTEMS)
    """Systems to compare, separated by commas; 'single' always runs, and first."""
    out: Path = Path("integration-results")
    """Folder of the results: absent, empty, or a former comparison, which is replaced."""
    models: str = "llama-10m,mixtral-10m,dit-3m"
    """Models to train, separated by commas; ``python -m integration.train --help`` lists them."""
    data: Path | None = None
    """File or folder to train on; by default the Python standard library's sources."""
    steps: int = 12
    """Optimizer steps per system and model."""
    warmup_steps: int = 4
    """The first of them, half at most, in which the learning rate grows to its full size."""
    share_processes: bool = True
    """Run the models of a system in the same processes, which saves time; what earlier ones leave
    in memory then counts with later ones."""
    global_batch: int = 8
    """Sequences per optimizer step, the same for every system."""
    micro_batch: int = 4
    """Sequences that one rank feeds the model at once."""
    sequence_length: int = 64
    """Tokens (bytes) per sequence."""
    learning_rate: float = 3e-4
    """The optimizers' learning rate. The smaller, the longer until rounding makes a router of
    Mixtral choose another expert for a token, which shows at once."""
    weight_decay: float = 0.1
    """Their decoupled weight decay."""
    seed: int = 0
    """Seed of the weights and of the order of the data."""
    threads: int = 1
    """CPU threads per rank."""
    timeout: float = 300.0
    """Seconds after which a collective that does not finish fails its run."""
    random_numbers: bool = True
    """Compare random numbers drawn on shards too, after the systems."""
    random_model: str = "llama-tiny"
    """Which model to train for that."""
    random_steps: int = 10
    """Optimizer steps of each of those runs."""
    parallelism: bool = True
    """Compare every product of parallelism by a plan too, and native torch's."""
    parallel_models: str = "llama-tiny,mixtral-tiny,dit-tiny"
    """Which models to train for that, separated by commas."""
    parallel_steps: int = 6
    """Optimizer steps of each of those runs."""
    every_case: bool = False
    """On more than 2 ranks, too, compare random weights and dropout each alone: otherwise there
    are only both together."""
    optimizers: bool = True
    """Compare fsdp's optimizers under DDP and under fsdp too, at last."""
    optimizer_model: str = "llama-tiny"
    """Which model to train for that."""
    optimizer_steps: int = 50
    """Optimizer steps of each of those runs."""
    diffusion: bool = True
    """Compare the pictures of a DiT trained on one device and sharded too, after all."""
    diffusion_model: str = "dit-small"
    """Which model to train for that."""
    diffusion_steps: int = 450
    """Optimizer steps of each of those runs; digits need about as many as the default."""

    def system_names(self) -> tuple[str, ...]:
        """Return the names of variants in their order: the reference, then as they were given.

        Raises:
            UsageError: there is none besides the reference.
        """
        given = [name.strip() for name in self.systems.split(",")]
        others = [name for name in dict.fromkeys(given) if name not in ("", REFERENCE)]
        if not others:
            choices = ", ".join(name for name in VARIANT_NAMES if name != REFERENCE)
            raise UsageError(
                f"--systems {self.systems!r} names nothing to compare with the single device;"
                f" add some of: {choices}"
            )
        return (REFERENCE, *others)

    def model_names(self) -> tuple[str, ...]:
        """Return the models that every system trains.

        Raises:
            UsageError: there is none.
        """
        names = _names(self.models)
        if not names:
            raise UsageError(
                f"--models {self.models!r} names nothing to train; python -m integration.train"
                " --help lists what there is"
            )
        return names

    def parallel_model_names(self) -> tuple[str, ...]:
        """Return the models on which products of parallelism are compared."""
        return _names(self.parallel_models)

    def command_line(self) -> list[str]:
        """Return every option spelled out, so that other defaults would not change the result."""
        return option_arguments({field.name: getattr(self, field.name) for field in fields(self)})


def _names(text: str) -> tuple[str, ...]:
    """The different names in a list by commas, in its order."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


# The defaults that a word before the options chooses.
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
    """Return a field's name as it is written on the command line."""
    return "--" + field.replace("_", "-")


def option_arguments(values: Mapping[str, object]) -> list[str]:
    """Return fields and values as a command line that tyro reads back; None is left out."""
    words: list[str] = []
    for field, value in values.items():
        if isinstance(value, bool):
            words.append(option_name(field if value else f"no_{field}"))
        elif value is not None:
            words += [option_name(field), str(value)]
    return words


def parse_options(arguments: Sequence[str]) -> CompareOptions:
    """Return what ``arguments`` (without the program's name) ask for: a profile, then options.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has said which argument is wrong.
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
