"""Read weights into a model, of which this rank may hold a part of each parameter.

By torch's distributed checkpoint: its planner finds which boxes of files each rank's parts are
made of, DTensors of all placements, RaggedShard's too, and only these are read.
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
    model: nn.Module, folder: WeightsFolder, pieces: Mapping[str, Sequence[ParameterChunk]]
) -> None:
    """Set the parameters of a parallel model to a folder's weights; all ranks call it.

    Values are cast to the dtype of the parameters. Sharded parameters are written in place.

    Args:
        model: as its system wraps it, with memory.
        folder: which fits the model; see `require_fits`.
        pieces: of the whole model's parameters.
    """
    weights = get_model_state_dict(model)
    # Of tied parameters only the first is in files, and loading sets the others.
    state = {name: tensor for name, tensor in weights.items() if name in pieces}
    dcp.load(state, storage_reader=_ChunksReader(folder, pieces))
    set_model_state_dict(model, state, options=StateDictOptions(strict=len(state) == len(weights)))


class _ChunksReader(HuggingFaceStorageReader):
    """torch's reader of safetensors, for parameters that are several tensors of files."""

    def __init__(
        self, folder: WeightsFolder, pieces: Mapping[str, Sequence[ParameterChunk]]
    ) -> None:
        super().__init__(str(folder.path))
        self._folder = folder
        self._pieces = {
            MetadataIndex(name, torch.Size(piece.offsets)): piece
            for name, of_one in pieces.items()
            for piece in of_one
        }

    def read_metadata(self) -> Metadata:
        """Describe each parameter, and each of its pieces as a chunk."""
        chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
        dtypes: dict[str, torch.dtype] = {}
        for index, piece in self._pieces.items():
            assert index.offset is not None
            chunks[index.fqn].append(ChunkStorageMetadata(index.offset, torch.Size(piece.sizes)))
            dtypes[index.fqn] = self._folder.tensors[piece.name].dtype
        parameters = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=dtypes[name]), _extent(of_one), of_one
            )
            for name, of_one in chunks.items()
        }
        return Metadata(
            state_dict_metadata=dict(parameters),
            storage_data=self._pieces,
            storage_meta=StorageMeta(load_id=self.load_id),
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Copy the planned boxes out of the files, one file after another."""
        from safetensors import safe_open

        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self._folder.tensors[self._piece(item).name].file].append(item)
        for file, items in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for item in items:
                    piece = self._piece(item)
                    box = [
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    # A scalar has no box to cut out; a matrix of an expert no dim of experts.
                    stored = opened.get_slice(piece.name)[tuple(box[len(box) - len(piece.shape) :])]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(stored.view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, item: ReadItem) -> ParameterChunk:
        return self._pieces[item.storage_index]


def _extent(chunks: Sequence[ChunkStorageMetadata]) -> torch.Size:
    ends = [[o + s for o, s in zip(c.offsets, c.sizes, strict=True)] for c in chunks]
    return torch.Size(max(of_dim) for of_dim in zip(*ends, strict=True))
