"""``python -m integration.hugging_face CHECKPOINT OUT``: converts a checkpoint to safetensors."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdp.checkpoint import save_safetensors
from integration.errors import EXIT_USAGE, UsageError
from integration.hugging_face.names import names_in_files
from integration.models import build_model_on_meta, shape_from
from integration.train.checkpoint import checkpoint
from integration.train.folders import make_folder, require_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="python -m integration.hugging_face", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoints/step-N of a run")
    parser.add_argument("out", type=Path, help="folder to write, for from_pretrained")
    parsed = parser.parse_args(arguments)
    try:
        export(parsed.checkpoint, parsed.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def export(path: Path, out: Path) -> None:
    """Writes the weights of a checkpoint, of any system and number of ranks, and config.json.

    The weights are in the memory of this process once. ``out`` is created when every file has been
    written.

    Raises:
        UsageError: the checkpoint is incomplete, or ``out`` exists or cannot be written.
    """
    manifest = checkpoint.read_manifest(path)
    require_folder(out)
    if out.exists():
        raise UsageError(f"{out} already exists; give another OUT, or remove it")
    model = build_model_on_meta(shape_from(manifest.identity.model)).to_empty(device="cpu")
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # which to_empty has undone
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a command that was killed
    make_folder(partial)
    checkpoint.load_weights(path, model.state_dict())
    save_safetensors(model, partial, rename=names_in_files(model))
    config: Any = getattr(model, "config", None)  # only Hugging Face's models have one
    if config is not None:
        config.architectures = [type(model).__name__]
        config.save_pretrained(partial)
    os.rename(partial, out)


if __name__ == "__main__":
    sys.exit(main())
