"""Reads the headers of a folder that `save_pretrained` wrote, and checks that a model fits."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from integration.errors import UsageError
from integration.hugging_face.chunks import ParameterChunk, Shape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


@dataclass(frozen=True)
class StoredTensor:
    """The header of a tensor in a file."""

    file: Path
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightsFolder:
    """The headers of a folder of safetensors files, and its config.json."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]


def open_folder(path: Path) -> WeightsFolder:
    """Reads the headers of a folder: of the files of its index, or of its only file.

    Raises:
        UsageError: there is no such folder, or a file is missing or damaged.
    """
    if not path.is_dir():
        raise UsageError(
            f"--init-from: expected a folder that save_pretrained wrote, got {path}; give another"
        )
    tensors: dict[str, StoredTensor] = {}
    for file in _files(path):
        tensors |= _header(file)
    config = _json(path / CONFIG) if (path / CONFIG).exists() else {}
    return WeightsFolder(path, tensors, config)


def require_fits(
    folder: WeightsFolder, chunks: Mapping[str, Iterable[ParameterChunk]], config: Mapping[str, Any]
) -> None:
    """Refuses a folder that does not contain the weights of a model.

    Args:
        folder: the opened folder.
        chunks: the chunks of the model's parameters.
        config: values of the model's configuration; those in config.json must be equal.

    Raises:
        UsageError: names the first value that differs, or the first tensor that is missing,
            unexpected or of another shape.
    """
    for key, value in config.items():
        if key in folder.config and folder.config[key] != value:
            raise UsageError(
                f"--init-from {folder.path} is of another model: its {key} is"
                f" {folder.config[key]!r}, this model's is {value!r}; give another --model"
            )
    extra = dict.fromkeys(folder.tensors)
    for chunk in (chunk for parts in chunks.values() for chunk in parts):
        stored = folder.tensors.get(chunk.name)
        if stored is None:
            raise UsageError(
                f"--init-from {folder.path} lacks the tensor {chunk.name}; give another --model"
            )
        if stored.shape != chunk.shape:
            raise UsageError(
                f"--init-from {folder.path}: the shape of {chunk.name} is {stored.shape}, this"
                f" model's is {chunk.shape}; give another --model"
            )
        del extra[chunk.name]
    for name in extra:
        raise UsageError(
            f"--init-from {folder.path} contains the tensor {name}, which this model does not"
            " have; give another --model"
        )


def _files(path: Path) -> list[Path]:
    if not (path / INDEX).exists():
        if not (path / WEIGHTS).exists():
            raise UsageError(
                f"--init-from: expected {WEIGHTS} or {INDEX} in {path}, got neither;"
                " give a folder that save_pretrained wrote"
            )
        return [path / WEIGHTS]
    try:
        return [path / name for name in sorted(set(_json(path / INDEX)["weight_map"].values()))]
    except (KeyError, AttributeError, TypeError) as error:
        raise _damaged(path / INDEX, "it has no weight_map") from error


def _header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import _getdtype

    tensors: dict[str, StoredTensor] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), _getdtype(part.get_dtype())
                tensors[name] = StoredTensor(file, shape, dtype)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error)) from error
    return tensors


def _json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    return values


def _damaged(file: Path, why: str) -> UsageError:
    return UsageError(f"--init-from: {file} cannot be read ({why}); download or write it again")
