"""Finds and reads a Hugging Face ``config.json``, without torch and without transformers."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Config:
    """A model's configuration: Hugging Face's keys, and the name that errors call it by."""

    name: str
    values: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        """Its ``model_type``, such as ``"llama"``.

        Raises:
            ValueError: It has none.
        """
        found = self.values.get("model_type")
        if not isinstance(found, str) or not found:
            raise ValueError(
                f"{self.name}: model_type is {found!r}; "
                f"a model's config.json names its architecture there"
            )
        return found

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number under a key; the default where the key is absent or null.

        Raises:
            ValueError: There is neither, or the number is no integer or below ``least``.
        """
        found = self.values.get(key)
        if found is None:
            if default is None:
                raise ValueError(f"{self.name}: {key} is missing; {self.architecture} needs it")
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            raise ValueError(f"{self.name}: {key} is {found!r}; it must be an integer >= {least}")
        return found

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def flag(self, key: str, *, default: bool) -> bool:
        """A boolean under a key; the default where the key is absent or null.

        Raises:
            ValueError: It is something else than a boolean.
        """
        found = self.values.get(key)
        if found is None:
            return default
        if not isinstance(found, bool):
            raise ValueError(f"{self.name}: {key} is {found!r}; it must be true or false")
        return found

    def layers(self, key: str) -> frozenset[int]:
        """The layer numbers listed under a key; none where the key is absent or null.

        Raises:
            ValueError: It is no list of integers.
        """
        found = self.values.get(key)
        if found is None:
            return frozenset()
        if not isinstance(found, list | tuple) or not all(type(item) is int for item in found):
            raise ValueError(f"{self.name}: {key} is {found!r}; it must be a list of integers")
        return frozenset(found)


def load_config(path_or_id: str) -> Config:
    """The configuration of a model on disk, in the hub's cache, or on the hub.

    Args:
        path_or_id: A ``config.json``, a folder that has one, or a hub id such as
            ``"openai/gpt-oss-120b"``. An id is looked for in the hub's cache first, and is
            downloaded only where ``huggingface_hub`` is installed, as transformers brings it.

    Raises:
        ValueError: There is no such file or model, or it holds no JSON object.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"{path_or_id} is a folder without a config.json")
    elif not path.is_file():
        path = _cached(path_or_id) or _downloaded(path_or_id)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; a config.json is a JSON object")
    return Config(path_or_id, values)


def _cached(model_id: str) -> Path | None:
    """The config.json of a hub id in the cache, by the layout that huggingface_hub documents."""
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    model = cache / f"models--{model_id.replace('/', '--')}"
    reference = model / "refs" / "main"
    if not reference.is_file():
        return None
    found = model / "snapshots" / reference.read_text().strip() / "config.json"
    return found if found.is_file() else None


def _downloaded(model_id: str) -> Path:
    """The config.json of a hub id, fetched by huggingface_hub."""
    if model_id.count("/") != 1 or model_id.endswith(".json") or model_id[0] in "/.~":
        raise ValueError(
            f"{model_id!r} is no file, no folder and no hub id; "
            f"give a config.json, its folder, or an id such as openai/gpt-oss-120b"
        )
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ValueError(
            f"{model_id} is neither a path here nor in the Hugging Face cache; download its "
            f"config.json, or pip install huggingface_hub to have it fetched"
        ) from error
    # It warns of every retry; the one line at the end is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(model_id, "config.json"))
    except Exception as error:  # anything of the network's, the hub's or the disk's
        # The hub's messages run over many lines; the first says what went wrong.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{model_id} could not be fetched from the hub: {reason}") from error
