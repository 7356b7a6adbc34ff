"""The command line of the soak."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from integration.device import DeviceOption
from integration.errors import UsageError
from integration.soak.fault_schedule import KINDS, Fault, draw_fault_schedule
from integration.train.config import parse_config
from integration.train.folders import require_folder
from integration.train.setup import prepare as prepare_run

UNDISTURBED = "undisturbed"
DISTURBED = "disturbed"

_DESCRIPTION = """Train twice under torchrun: once undisturbed, once with a fault every so often.

Each fault kills or stops a random rank, or makes it raise; torchrun restarts the ranks, which
resume from the newest complete checkpoint. Writes OUT/soak.md, OUT/soak.json and both runs. Exit
code: 0, 1 if a loss differs in any bit or the run does not recover from a fault, 2 if the options
are invalid."""


@dataclass(frozen=True)
class SoakOptions:
    """The options of a soak."""

    out: Path = Path("soak-results")
    """Folder of the log and of both runs."""
    steps: int = 500
    """Optimizer steps."""
    every: int = 50
    """Steps between faults."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    kinds: str = ",".join(KINDS)
    """Kinds of faults, separated by commas."""
    timeout: float = 20.0
    """Seconds within which a hanging rank must be detected."""
    ranks: int = 2
    """Number of ranks, on this machine."""
    system: str = "ddp"
    """System, as in integration.train."""
    model: str = "llama-tiny"
    """Model, as in integration.train."""
    config: Path | None = None
    """TOML file of integration.train, such as a recipe, with system, model and other options."""
    device: DeviceOption = "auto"
    """Device, as in integration.train."""
    seed: int = 0
    """Seed of the faults, the weights and the data."""
    json: bool = False
    """Print soak.json to stdout, and the faults to stderr."""

    def train_arguments(self, run: str) -> list[str]:
        """Returns the arguments of integration.train for one of the two runs."""
        trained = ("--system", self.system, "--model", self.model)
        if self.config is not None:
            trained = ("--config", str(self.config), "--ranks", "None")  # torchrun starts them
        return [
            *trained,
            *("--out", str(self.out / run)),
            *("--steps", str(self.steps), "--checkpoint-every", str(self.checkpoint_every)),
            *("--timeout", str(self.timeout), "--seed", str(self.seed), "--no-tensorboard"),
            *("--device", self.device, "--no-final-checkpoint"),
        ]


def parse_options(arguments: Sequence[str]) -> SoakOptions:
    """Parses ``arguments``, without the program's name.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has named the invalid argument.
    """
    return tyro.cli(
        SoakOptions, prog="python -m integration.soak", description=_DESCRIPTION, args=arguments
    )


def prepare(options: SoakOptions) -> list[Fault]:
    """Validates the options and returns the faults; nothing is written.

    Raises:
        UsageError: an option is invalid.
    """
    require_folder(options.out)
    defaults = SoakOptions()
    if options.config is not None:
        for name in ("system", "model"):
            if (given := getattr(options, name)) != getattr(defaults, name):
                raise UsageError(
                    f"--{name} {given}: expected it in --config {options.config}, which has the"
                    " options of the runs; leave one of them out"
                )
    if options.ranks < 2:
        raise UsageError(
            f"--ranks: expected at least 2, so that one detects the hang of another, got"
            f" {options.ranks}; give more"
        )
    if not 0 < options.checkpoint_every < options.every < options.steps:
        raise UsageError(
            "expected --checkpoint-every < --every < --steps, as a fault needs a checkpoint before"
            f" it and a step after it, got {options.checkpoint_every}, {options.every} and"
            f" {options.steps}; give others"
        )
    kinds = list(dict.fromkeys(word.strip() for word in options.kinds.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(
            f"--kinds: expected some of {', '.join(KINDS)}, got {unknown[0]!r}; give others"
        )
    for run in (UNDISTURBED, DISTURBED):
        config = parse_config([*options.train_arguments(run), "--resume", "never"])
        prepare_run(config, options.ranks)
    return draw_fault_schedule(
        steps=options.steps,
        every=options.every,
        ranks=options.ranks,
        kinds=kinds,
        seed=options.seed,
    )
