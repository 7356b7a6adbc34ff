"""Writes weights as Hugging Face's safetensors files, with an index."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from integration.hugging_face.chunks import ParameterChunk

FILE_BYTES = 5 * 10**9


def write_weights(
    folder: Path,
    weights: Mapping[str, Tensor],
    chunks: Mapping[str, Sequence[ParameterChunk]],
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes the full weights of a model.

    Args:
        folder: folder to write.
        weights: full tensors by parameter name.
        chunks: chunks of the parameters.
        file_bytes: largest size of a file, unless a single tensor is larger.
    """
    tensors = {
        chunk.name: _chunk_of(weights[name], chunk)
        for name, parts in chunks.items()
        for chunk in parts
    }
    files: dict[str, int] = {}
    index, used = 1, 0
    for name, tensor in tensors.items():
        if used and used + tensor.nbytes > file_bytes:
            index, used = index + 1, 0
        files[name] = index
        used += tensor.nbytes
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to save")
        dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def _chunk_of(weight: Tensor, chunk: ParameterChunk) -> Tensor:
    box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
    return weight[box].reshape(chunk.shape).contiguous()
