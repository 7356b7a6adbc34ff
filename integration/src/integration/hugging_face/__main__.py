"""``python -m integration.hugging_face CHECKPOINT OUT``: converts a checkpoint to safetensors."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedModel

from fsdp.checkpoint import save_safetensors
from integration.errors import EXIT_USAGE, UsageError
from integration.hugging_face.names import names_in_files
from integration.hugging_face.quantized import Quantization, quantize_model
from integration.models import build_model_on_meta, shape_from
from integration.report.command_output import ProgressBar, print_result
from integration.report.formatting import mebibytes
from integration.systems.base import Precision
from integration.train.checkpoint import checkpoint
from integration.train.config import EXCLUDED_FROM_PRECISION
from integration.train.folders import make_folder, require_folder

_STEPS = ("reading the weights", "writing safetensors")


@dataclass(frozen=True)
class Exported:
    """A folder of safetensors.

    Attributes:
        checkpoint: whose weights it has.
        step: of the checkpoint.
        out: the folder.
        files: names of its files of weights.
        bytes: of the tensors in them.
    """

    checkpoint: Path
    step: int
    out: Path
    files: tuple[str, ...]
    bytes: int

    def __str__(self) -> str:
        """Returns a line on what was written."""
        files = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return f"exported: step {self.step}, {mebibytes(self.bytes)} in {files}: {self.out}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="python -m integration.hugging_face", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-N of a run")
    parser.add_argument("out", type=Path, help="folder to write, for from_pretrained")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="none",
        help="recipe that linear layers' weights are quantized by; none: the same bytes",
    )  # fmt: skip
    parser.add_argument(
        "--precision-exclude", metavar="PATTERN",
        help=f"names of linear layers that are not quantized; {EXCLUDED_FROM_PRECISION} by default",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parsed = parser.parse_args(arguments)
    try:
        quantization = Quantization.of(parsed.precision, parsed.precision_exclude)
        with ProgressBar() as bar:
            exported = export(parsed.checkpoint, parsed.out, bar, quantization)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    print_result(str(exported), asdict(exported), as_json=parsed.json)
    return 0


def export(
    path: Path, out: Path, bar: ProgressBar, quantization: Quantization | None = None
) -> Exported:
    """Writes the weights of a checkpoint, of any system and number of ranks, and config.json.

    The weights are in the memory of this process once, and those that are quantized a second time
    in float8. ``out`` is created when every file has been written, and ``bar`` shows what is done.

    Args:
        path: of the checkpoint.
        out: is created.
        bar: shows progress.
        quantization: of linear layers; None writes the checkpoint's bytes.

    Raises:
        UsageError: the checkpoint is incomplete, ``out`` exists or cannot be written, or the model
            cannot be quantized so.
    """
    manifest = checkpoint.read_manifest(path)
    require_folder(out)
    if out.exists():
        raise UsageError(f"{out} already exists; give another OUT, or remove it")
    model = build_model_on_meta(shape_from(manifest.identity.model)).to_empty(device="cpu")
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # which to_empty has undone
    bar.show(_STEPS[0], 0, len(_STEPS))
    checkpoint.load_weights(path, model.state_dict())
    if quantization is not None:
        quantize_model(model, quantization)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a command that was killed
    make_folder(partial)
    bar.show(_STEPS[1], 1, len(_STEPS))
    saved = save_safetensors(model, partial, rename=names_in_files(model))
    config: Any = getattr(model, "config", None)  # only Hugging Face's models have one
    if config is not None:
        config.architectures = [type(model).__name__]
        config.save_pretrained(partial)
    os.rename(partial, out)
    return Exported(path, manifest.step, out, saved.files, saved.total_bytes)


if __name__ == "__main__":
    sys.exit(main())
