"""A folder as `save_pretrained` writes it: what it holds, and whether that is a model's."""

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
    """A tensor of a file, not read yet."""

    file: Path
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightsFolder:
    """A folder of safetensors files, of which only the headers were read."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]


def open_folder(path: Path) -> WeightsFolder:
    """Read what a folder holds: the files of its index, or its only one.

    Raises:
        UsageError: there is no such folder, or a file is missing or damaged.
    """
    if not path.is_dir():
        raise UsageError(f"--init-from {path} is no folder; give one that save_pretrained wrote")
    tensors: dict[str, StoredTensor] = {}
    for file in _files(path):
        tensors |= _header(file)
    config = _json(path / CONFIG) if (path / CONFIG).exists() else {}
    return WeightsFolder(path, tensors, config)


def require_fits(
    folder: WeightsFolder, pieces: Mapping[str, Iterable[ParameterChunk]], config: Mapping[str, Any]
) -> None:
    """Refuse a folder that does not hold the weights of a model.

    Args:
        folder: that was opened.
        pieces: of the model's parameters.
        config: values of the model's that must be those of the folder's config.json.

    Raises:
        UsageError: naming the first value that differs, or the first tensor that is missing, of
            another shape, or not the model's.
    """
    for key, value in config.items():
        if key in folder.config and folder.config[key] != value:
            raise UsageError(
                f"--init-from {folder.path} is of another model: its {key} is"
                f" {folder.config[key]!r}, this model's is {value!r}; give another --model"
            )
    extra = dict.fromkeys(folder.tensors)
    for piece in (piece for of_one in pieces.values() for piece in of_one):
        stored = folder.tensors.get(piece.name)
        if stored is None:
            raise UsageError(
                f"--init-from {folder.path} lacks the tensor {piece.name}; give another --model"
            )
        if stored.shape != piece.shape:
            raise UsageError(
                f"--init-from {folder.path}: the shape of {piece.name} is {stored.shape}, this"
                f" model's is {piece.shape}; give another --model"
            )
        del extra[piece.name]
    for name in extra:
        raise UsageError(
            f"--init-from {folder.path} holds the tensor {name}, which this model does not have;"
            " give another --model"
        )


def _files(path: Path) -> list[Path]:
    if not (path / INDEX).exists():
        if not (path / WEIGHTS).exists():
            raise UsageError(
                f"--init-from {path} holds neither {WEIGHTS} nor {INDEX};"
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
