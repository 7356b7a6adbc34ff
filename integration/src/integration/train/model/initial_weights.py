"""``--init-from``: loads the initial weights from a folder of safetensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fsdp.checkpoint import TensorPart, check_safetensors, load_safetensors
from integration.errors import UsageError
from integration.hugging_face.names import names_in_files
from integration.models import ModelShape, build_model_on_meta
from integration.train.config import TrainConfig

CONFIG = "config.json"


@dataclass(frozen=True)
class InitialWeights:
    """A validated folder of weights of a run's model.

    Attributes:
        folder: of safetensors.
        rename: returns the names in files.
    """

    folder: Path
    rename: Callable[[str], str | list[TensorPart]]

    @staticmethod
    def open(config: TrainConfig, shape: ModelShape) -> "InitialWeights":
        """Validates ``--init-from``; reads headers only.

        Raises:
            UsageError: the folder cannot be read, or has another model's weights.
        """
        assert config.init_from is not None
        folder, model = config.init_from, build_model_on_meta(shape)
        _require_config(folder, asdict(shape))
        rename = names_in_files(model)
        try:
            check_safetensors(model, folder, rename=rename)
        except ValueError as error:
            raise UsageError(
                f"--init-from {folder} does not have this model's weights ({error}); give another "
                f"--init-from or --model"
            ) from error
        return InitialWeights(folder, rename)

    def allocate(self, model: nn.Module, device: str) -> None:
        """Allocates a Hugging Face model on meta and computes its buffers, but draws no weights."""
        model.to_empty(device=device)
        for parameter in model.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # its initialiser's
        model.init_weights()  # type: ignore[operator]

    def load(self, model: nn.Module) -> None:
        """Loads the weights into a model, parallelized or not; all ranks call it."""
        load_safetensors(model, self.folder, rename=self.rename)


def _require_config(folder: Path, expected: Mapping[str, Any]) -> None:
    """Refuses a folder whose config.json, where it has one, is that of another model."""
    file = folder / CONFIG
    if not file.exists():
        return
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--init-from: {file} cannot be read ({error}); download or write it again"
        ) from error
    for key, value in expected.items():
        if key in found and found[key] != value:
            raise UsageError(
                f"--init-from {folder} is of another model: its {key} is {found[key]!r}, this "
                f"model's is {value!r}; give another --model"
            )
