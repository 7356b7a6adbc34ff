"""The command that samples images or text from a checkpoint."""

import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from integration.data import Modality
from integration.device import Device, DeviceOption, select_device
from integration.errors import EXIT_USAGE, UsageError
from integration.models import shape_from
from integration.report.command_output import ProgressBar, print_result
from integration.sampling.image import Sampling, write_images
from integration.sampling.text import TextSampling, generate, load_text_model
from integration.systems.base import LayerPolicies, Precision
from integration.train.checkpoint import checkpoint
from integration.train.config import EXCLUDED_FROM_PRECISION, regular_expression
from integration.train.folders import require_folder

_DESCRIPTION = """Sample from a checkpoint of a run, of any system and number of ranks.

A DiT draws digits into --out FILE.png, a column per class and a row per sample, by DDIM's
deterministic steps with classifier-free guidance. A language model continues --prompt; the text
goes to stdout, or to --out FILE.txt. A seed gives the same samples."""
_IMAGES_OF_EACH_DIGIT = 6
_LINE = "-" * 72


@dataclass(frozen=True)
class SampleOptions:
    """The options of the command."""

    checkpoint: tyro.conf.Positional[Path]
    """A folder checkpoints/step-N of a run, of any system and number of ranks."""
    out: Path | None = None
    """PNG file of images, or text file, to write; an existing file is replaced."""
    samples: int | None = None
    """Images of each digit, 6 by default; or texts, 1 by default."""
    device: DeviceOption = "auto"
    """auto (the machine's accelerator, or the CPU), cpu, cuda, or sim, which is testkit's simulated
    accelerator."""
    precision: Precision = "none"
    """Recipe by which matrix products quantize their operands, as of a run with --precision."""
    precision_exclude: str = EXCLUDED_FROM_PRECISION
    """Pattern of the names of linear layers and experts that do not, as of the run."""
    json: bool = False
    """Print what was sampled as JSON, with the texts."""
    sampling: Annotated[Sampling, tyro.conf.arg(name="")] = field(default_factory=Sampling)
    text: Annotated[TextSampling, tyro.conf.arg(name="")] = field(default_factory=TextSampling)


@dataclass(frozen=True)
class Sampled:
    """What the command has sampled.

    Attributes:
        checkpoint: of the model.
        seed: of the noise, or of the tokens.
        out: the file that was written; None: none.
        images: number of images of a DiT.
        texts: of a language model.
    """

    checkpoint: Path
    seed: int
    out: Path | None
    images: int = 0
    texts: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """The texts, as a file or the terminal gets them."""
        return f"\n{_LINE}\n".join(self.texts) + "\n"

    def __str__(self) -> str:
        """Returns a line on what was sampled."""
        number, what = (len(self.texts), "text") if self.texts else (self.images, "image")
        where = "" if self.out is None else f": {self.out}"
        return f"sampled: {number} {what}{'s' * (number > 1)} of {self.checkpoint.name}{where}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    try:
        options = tyro.cli(
            SampleOptions,
            prog="python -m integration.sampling",
            description=_DESCRIPTION,
            args=arguments,
        )
        sampled = write_samples(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    if sampled.out is None and not options.json:  # stdout has the texts alone
        sys.stdout.write(sampled.content)
        print(sampled, file=sys.stderr)
    else:
        print_result(str(sampled), asdict(sampled), as_json=options.json)
    return 0


def write_samples(options: SampleOptions) -> Sampled:
    """Samples what the checkpoint's model generates, and writes it where ``out`` names a file.

    Raises:
        UsageError: the checkpoint is incomplete, or an option is invalid or has no effect.
    """
    if options.samples is not None and options.samples < 1:
        raise UsageError(f"--samples: expected at least 1, got {options.samples}; give 1 or more")
    policies = _policies(options)
    device = select_device(options.device)
    shape = shape_from(checkpoint.read_manifest(options.checkpoint).identity.model)
    if shape.modality is Modality.TEXT:
        return _write_text(options, device, policies)
    _refuse(
        options.text, ("prompt", "max_tokens", "temperature", "top_k", "tokenizer"), "a decoder"
    )
    if options.out is None:
        raise UsageError("--out: expected the name of a PNG file for images, got none; give one")
    _require_file(options.out, ".png")
    device.start(local_rank=0, rank=0)
    with ProgressBar() as bar:
        images = write_images(
            options.checkpoint,
            options.out,
            options.sampling,
            samples=options.samples or _IMAGES_OF_EACH_DIGIT,
            device=device,
            policies=policies,
            progress=lambda step: bar.show("denoising", step, options.sampling.steps),
        )
    return Sampled(options.checkpoint, options.sampling.seed, options.out, images)


def _policies(options: SampleOptions) -> LayerPolicies:
    """Returns the recipe of the model's products."""
    if options.precision == "none" and options.precision_exclude != EXCLUDED_FROM_PRECISION:
        raise UsageError(
            "--precision-exclude: expected --precision with a recipe, got none; give one, or leave"
            " --precision-exclude out"
        )
    try:
        regular_expression(options.precision_exclude)
    except ValueError as error:
        raise UsageError(f"--precision-exclude: {error}; correct it") from error
    return LayerPolicies(precision=options.precision, precision_exclude=options.precision_exclude)


def _write_text(options: SampleOptions, device: Device, policies: LayerPolicies) -> Sampled:
    _refuse(options.sampling, ("steps", "guidance"), "a DiT")
    out = options.out
    if out is not None:
        _require_file(out, ".txt")
    decoder = load_text_model(options.checkpoint, options.text.tokenizer, policies, device.type)
    device.start(local_rank=0, rank=0)
    decoder.model.to(device.current)
    seed = options.sampling.seed
    with ProgressBar() as bar:
        texts = generate(
            decoder,
            options.text,
            samples=options.samples or 1,
            seed=seed,
            progress=lambda token: bar.show("tokens", token, options.text.max_tokens),
        )
    sampled = Sampled(options.checkpoint, seed, out, texts=tuple(texts))
    if out is None:
        return sampled
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(sampled.content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write --out {out} ({error.strerror}); give another") from error
    return sampled


def _refuse(options: Any, names: Sequence[str], expected: str) -> None:
    """Refuses options that a model has no use for, unless they have their defaults."""
    for each in fields(options):
        assert each.default is not MISSING
        value = getattr(options, each.name)
        if each.name in names and value != each.default:
            raise UsageError(
                f"--{each.name.replace('_', '-')} {value}: expected a checkpoint of {expected},"
                " got one of another model; leave it out"
            )


def _require_file(out: Path, suffix: str) -> None:
    if out.suffix.lower() != suffix:
        raise UsageError(f"--out: expected a name that ends in {suffix}, got {out}; give another")
    if out.is_dir():
        raise UsageError(f"--out: expected a file, got the folder {out}; give a file name")
    require_folder(out.parent)
