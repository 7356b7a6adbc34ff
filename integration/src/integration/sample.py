"""``python -m integration.sample CHECKPOINT --out FILE.png``: images from a trained DiT."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from integration.errors import EXIT_USAGE, UsageError
from integration.paths import require_folder
from integration.sampling import Sampling, digits_in_turn, load_dit, sample

_DESCRIPTION = """Draw digits by a checkpoint of a DiT: a column for each class, a row per sample.

DDIM's deterministic steps with classifier-free guidance; the same seed gives the same images."""


@dataclass(frozen=True)
class SampleOptions:
    """What the command is told."""

    checkpoint: tyro.conf.Positional[Path]
    """A folder checkpoints/step-N of a run, of any system and number of ranks."""
    out: Path
    """The image to write, a PNG; a file of that name is replaced."""
    samples: int = 6
    """Images of each digit."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for a user's mistake."""
    try:
        options = tyro.cli(
            SampleOptions,
            prog="python -m integration.sample",
            description=_DESCRIPTION,
            args=arguments,
        )
        draw(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def draw(options: SampleOptions) -> None:
    """Write the image.

    Raises:
        UsageError: it is no complete checkpoint of a DiT, or a number or the path does not do.
    """
    out = options.out
    if out.suffix.lower() != ".png":
        raise UsageError(f"--out {out} is no name of a PNG; give one that ends in .png")
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder; give the name of a file")
    require_folder(out.parent)
    if options.samples < 1:
        raise UsageError(f"--samples is {options.samples}; give 1 or more")
    model = load_dit(options.checkpoint)
    images = sample(model, digits_in_turn(options.samples), options.sampling)
    # Imported late: it takes seconds, which nobody who is refused should wait.
    from integration.report.diffusion_figure import save_grid

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_grid(images, out)
    except OSError as error:
        raise UsageError(f"cannot write --out {out} ({error.strerror}); give another") from error


if __name__ == "__main__":
    sys.exit(main())
