"""Loads weights into a model whose parameters may be sharded.

torch's distributed checkpoint does it: its planner maps the shards of each rank, for DTensors of
all placements including RaggedShard, to boxes in files, and only these are read.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

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

from integration.hugging_face.chunks import ParameterChunk
from integration.hugging_face.folder import WeightsFolder


def load_weights(
    model: nn.Module, folder: WeightsFolder, chunks: Mapping[str, Sequence[ParameterChunk]]
) -> None:
    """Sets the parameters of a parallel model to a folder's weights; all ranks call it.

    Values are cast to the dtype of the parameters. Sharded parameters are written in place.

    Args:
        model: as its system wraps it, with memory.
        folder: which fits the model; see `require_fits`.
        chunks: of the whole model's parameters.
    """
    weights = get_model_state_dict(model)
    # Of tied parameters only the first is in files, and loading sets the others.
    state = {name: tensor for name, tensor in weights.items() if name in chunks}
    dcp.load(state, storage_reader=_ChunksReader(folder, chunks))
    set_model_state_dict(model, state, options=StateDictOptions(strict=len(state) == len(weights)))


class _ChunksReader(HuggingFaceStorageReader):
    """torch's reader of safetensors, for parameters that are several tensors of files."""

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
        """Describes each parameter, and each of its chunks as a chunk."""
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
        """Copies the planned boxes out of the files, one file after another."""
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
                    # A scalar has no box to cut out; a matrix of an expert no dim of experts.
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
