"""Reads a folder that `save_pretrained` wrote: its headers, and the weights of a parallel model.

torch's distributed checkpoint loads weights: its planner maps the shards of each rank, for DTensors
of all placements including RaggedShard, to boxes in files, and only these are read.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.futures import Future

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


def load_weights(
    model: nn.Module, folder: WeightsFolder, chunks: Mapping[str, Sequence[ParameterChunk]]
) -> None:
    """Sets the parameters of a parallel model to a folder's weights; all ranks call it.

    Values are cast to the dtype of the parameters. Sharded parameters are written in place.

    Args:
        model: model that its system has parallelized, with allocated parameters.
        folder: folder that fits the model; see `require_fits`.
        chunks: chunks of the full model's parameters.
    """
    weights = get_model_state_dict(model)
    # Of tied parameters only the first is in files, and loading sets the others.
    state = {name: tensor for name, tensor in weights.items() if name in chunks}
    dcp.load(state, storage_reader=_ChunksReader(folder, chunks))
    set_model_state_dict(model, state, options=StateDictOptions(strict=len(state) == len(weights)))


class _ChunksReader(HuggingFaceStorageReader):
    """Reads safetensors as torch does, with parameters that consist of several tensors in files."""

    def __init__(
        self, folder: WeightsFolder, chunks: Mapping[str, Sequence[ParameterChunk]]
    ) -> None:
        super().__init__(str(folder.path))
        self._folder = folder
        self._chunks = {
            MetadataIndex(name, torch.Size(chunk.offsets)): chunk
            for name, parts in chunks.items()
            for chunk in parts
        }

    def read_metadata(self) -> Metadata:
        """Returns the metadata of each parameter, with a chunk for each tensor in a file."""
        stored_chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        dtypes: dict[str, torch.dtype] = {}
        for index, chunk in self._chunks.items():
            assert index.offset is not None
            stored_chunks[index.fqn].append(
                ChunkStorageMetadata(index.offset, torch.Size(chunk.sizes))
            )
            dtypes[index.fqn] = self._folder.tensors[chunk.name].dtype
        parameters = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtypes[name]), _extent(parts), parts)
            for name, parts in stored_chunks.items()
        }
        return Metadata(
            state_dict_metadata=dict(parameters),
            storage_data=self._chunks,
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copies the planned boxes from the files, one file after another."""
        from safetensors import safe_open

        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._folder.tensors[self._chunk(item).name].file].append(item)
        for file, items in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for item in items:
                    chunk = self._chunk(item)
                    box = [
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    # A scalar has no box; the matrix of an expert has no dim of experts.
                    stored = opened.get_slice(chunk.name)[tuple(box[len(box) - len(chunk.shape) :])]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(stored.view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, item: ReadItem) -> ParameterChunk:
        return self._chunks[item.storage_index]


def _extent(stored_chunks: Sequence[ChunkStorageMetadata]) -> torch.Size:
    ends = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in stored_chunks]
    return torch.Size(max(of_dim) for of_dim in zip(*ends, strict=True))
