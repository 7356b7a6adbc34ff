"""``python -m integration.sample CHECKPOINT --out FILE.png``: samples images from a DiT."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from integration.errors import EXIT_USAGE, UsageError
from integration.paths import require_folder
from integration.sampling import Sampling, digits_in_turn, load_dit, sample

_DESCRIPTION = """Sample digits from a checkpoint of a DiT: a column per class, a row per sample.

Uses DDIM's deterministic steps with classifier-free guidance; a seed gives the same images."""


@dataclass(frozen=True)
class SampleOptions:
    """The options of the command."""

    checkpoint: tyro.conf.Positional[Path]
    """A folder checkpoints/step-N of a run, of any system and number of ranks."""
    out: Path
    """PNG file to write; an existing file is replaced."""
    samples: int = 6
    """Images of each digit."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    try:
        options = tyro.cli(
            SampleOptions,
            prog="python -m integration.sample",
            description=_DESCRIPTION,
            args=arguments,
        )
        write_samples(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def write_samples(options: SampleOptions) -> None:
    """Samples images and writes them as one PNG.

    Raises:
        UsageError: the checkpoint is incomplete or not a DiT's, or an option is invalid.
    """
    out = options.out
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out: expected a name that ends in .png, got {out}; give another")
    if out.is_dir():
        raise UsageError(f"--out: expected a file, got the folder {out}; give a file name")
    require_folder(out.parent)
    if options.samples < 1:
        raise UsageError(f"--samples: expected at least 1, got {options.samples}; give 1 or more")
    model = load_dit(options.checkpoint)
    images = sample(model, digits_in_turn(options.samples), options.sampling)
    # Imported after validation, as importing matplotlib takes seconds.
    from integration.report.diffusion_figure import save_grid

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_grid(images, out)
    except OSError as error:
        raise UsageError(f"cannot write --out {out} ({error.strerror}); give another") from error


if __name__ == "__main__":
    sys.exit(main())
