"""Finds and reads a Hugging Face ``config.json``, without torch and without transformers."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """A model's configuration: Hugging Face's keys, and the name of the model in errors."""

    name: str
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """The configuration's ``model_type``, such as ``"llama"``.

        Raises:
            ValueError: It has none.
        """
        model_type = self.values.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise ValueError(
                f"{self.name}: expected the architecture's name as model_type, got {model_type!r}; "
                f"pass a model's config.json"
            )
        return model_type


def load_config(path_or_id: str) -> ModelConfig:
    """Reads the configuration of a model on disk, in the hub's cache, or on the hub.

    Args:
        path_or_id: A ``config.json``, a folder that has one, or a hub id such as
            ``"openai/gpt-oss-120b"``. An id is looked up in the hub's cache first, and is
            downloaded only where ``huggingface_hub`` is installed, as transformers requires it.

    Raises:
        ValueError: There is no such file or model, or it is not a JSON object.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"expected a folder with a config.json, got {path_or_id}")
    elif not path.is_file():
        path = _cached(path_or_id) or _downloaded(path_or_id)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(values).__name__}")
    return ModelConfig(path_or_id, values)


def _cached(model_id: str) -> Path | None:
    """Finds a hub id's config.json in the cache, whose layout huggingface_hub documents."""
    hub_home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(hub_home) / "hub")
    model = cache / f"models--{model_id.replace('/', '--')}"
    reference = model / "refs" / "main"
    if not reference.is_file():
        return None
    path = model / "snapshots" / reference.read_text().strip() / "config.json"
    return path if path.is_file() else None


def _downloaded(model_id: str) -> Path:
    """Downloads the config.json of a hub id by huggingface_hub."""
    if model_id.count("/") != 1 or model_id.endswith(".json") or model_id[0] in "/.~":
        raise ValueError(
            f"expected a config.json, its folder, or a hub id such as openai/gpt-oss-120b, got "
            f"{model_id!r}, which is none of these"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ValueError(
            f"{model_id} is neither a path here nor in the Hugging Face cache; download its "
            f"config.json, or pip install huggingface_hub, which downloads it"
        ) from error
    # It warns at every retry; the error below is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(model_id, "config.json"))
    except Exception as error:  # of the network, the hub or the disk
        # The hub's messages have many lines, of which the first has the reason.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{model_id} could not be downloaded from the hub: {reason}") from error
