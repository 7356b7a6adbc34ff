"""What a soak is told on the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from integration.errors import UsageError
from integration.paths import require_folder
from integration.soak.fault_schedule import KINDS, Fault, draw_fault_schedule
from integration.train.config import parse_config
from integration.train.setup import prepare as prepare_run

UNDISTURBED = "undisturbed"
DISTURBED = "disturbed"

_DESCRIPTION = """Train twice under torchrun: once undisturbed, once with a fault every so often.

Each time a random rank is killed, stopped or made to raise; torchrun restarts the ranks and they
resume from the newest complete checkpoint. Writes OUT/soak.md, OUT/soak.json and both runs. Exit
code: 0, 1 when a loss differs in any bit or a fault was not got over, 2 when the options are
wrong."""


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
    """Seconds within which a rank that stands still must be noticed."""
    ranks: int = 2
    """Ranks, on this machine."""
    system: str = "ddp"
    """How to run them: as of integration.train."""
    model: str = "llama-tiny"
    """As of integration.train."""
    seed: int = 0
    """Of the faults, and of the weights and the data."""

    def train_arguments(self, run: str) -> list[str]:
        """Return what integration.train is given for one of the two runs."""
        return [
            *("--out", str(self.out / run), "--system", self.system, "--model", self.model),
            *("--steps", str(self.steps), "--checkpoint-every", str(self.checkpoint_every)),
            *("--timeout", str(self.timeout), "--seed", str(self.seed), "--no-tensorboard"),
            "--no-final-checkpoint",
        ]


def parse_options(arguments: Sequence[str]) -> SoakOptions:
    """Return what ``arguments`` (without the program's name) ask for.

    Raises:
        SystemExit: after ``--help`` (0), or with 2 after tyro has said which argument is wrong.
    """
    return tyro.cli(
        SoakOptions, prog="python -m integration.soak", description=_DESCRIPTION, args=arguments
    )


def prepare(options: SoakOptions) -> list[Fault]:
    """Look at the options, and return the faults; nothing is written.

    Raises:
        UsageError: one is wrong.
    """
    require_folder(options.out)
    if options.ranks < 2:
        raise UsageError(
            f"--ranks {options.ranks} leaves nobody to notice a rank that stands still; give at"
            " least 2"
        )
    if not 0 < options.checkpoint_every < options.every < options.steps:
        raise UsageError(
            f"--checkpoint-every {options.checkpoint_every}, --every {options.every} and --steps"
            f" {options.steps} must grow in this order: a fault needs a checkpoint before it and a"
            " step behind it"
        )
    kinds = list(dict.fromkeys(word.strip() for word in options.kinds.split(",")))
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(
            f"--kinds {options.kinds!r} has {unknown[0]!r}; choose of {', '.join(KINDS)}"
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
