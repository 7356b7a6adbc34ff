"""Write weights as Hugging Face's safetensors files, with an index."""

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
    pieces: Mapping[str, Sequence[ParameterChunk]],
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a model's weights, whole on this process, as files hold them.

    Args:
        folder: to write to.
        weights: by the names of parameters.
        pieces: of the parameters.
        file_bytes: what a file holds at most, if no tensor is larger.
    """
    tensors = {
        piece.name: _cut(weights[name], piece)
        for name, of_one in pieces.items()
        for piece in of_one
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


def _cut(weight: Tensor, piece: ParameterChunk) -> Tensor:
    box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
    return weight[box].reshape(piece.shape).contiguous()
