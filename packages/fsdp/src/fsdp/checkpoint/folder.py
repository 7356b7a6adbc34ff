"""Folders of safetensors: the headers that are read, and those that are written.

A file is the length of its header in 8 bytes, a header in JSON and the tensors, contiguous and in
the header's order (https://huggingface.co/docs/safetensors). Folders of several files have an index
from names of tensors to names of files. The library reads headers and tensors; it writes files only
from whole tensors, so headers of files that several ranks write are made here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp.checkpoint.names import Shape

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def dtypes() -> Mapping[str, torch.dtype]:
    """Returns the dtypes that the format has, by their names in headers."""
    from safetensors.torch import _TYPES  # torch/distributed/checkpoint/_hf_utils.py has fewer

    return {name: dtype for name, dtype in _TYPES.items() if isinstance(dtype, torch.dtype)}


@dataclass(frozen=True)
class StoredTensor:
    """The header of a tensor, and the file that it is in."""

    file: Path
    shape: Shape
    dtype: torch.dtype


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Reads the headers of the files of a folder's index, or of its only file.

    Raises:
        ValueError: there is no such folder; a file is missing or damaged, or has a dtype that torch
            has not.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, StoredTensor] = {}
    dtype_of = dtypes()
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # it is no mapping
                    part = opened.get_slice(name)
                    dtype = dtype_of.get(part.get_dtype())
                    if dtype is None:
                        raise ValueError(
                            f"expected a dtype of torch for {name!r} in {file}, got "
                            f"{part.get_dtype()}; write it in another one"
                        )
                    tensors[name] = StoredTensor(file, tuple(part.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            raise _damaged(file, str(error)) from error
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (OSError, ValueError) as error:
            raise _damaged(index, str(error)) from error
        except (KeyError, AttributeError, TypeError) as error:
            raise _damaged(index, "it has no weight_map") from error
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    raise ValueError(
        f"expected a folder with {WEIGHTS} or {INDEX}, as save_pretrained writes it, got {folder}, "
        f"which {'has neither' if folder.is_dir() else 'is no folder'}"
    )


def _damaged(file: Path, why: str) -> ValueError:
    return ValueError(f"{file} cannot be read ({why}); download or write it again")


@dataclass(frozen=True)
class FileTensor:
    """A tensor that is to be written."""

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A file that is to be written.

    Attributes:
        name: in the folder.
        header: the first bytes, its length included.
        starts: of each tensor, the offset of its first byte in the file.
        nbytes: of the file.
    """

    name: str
    header: bytes
    starts: Mapping[str, int]
    nbytes: int


def lay_out(tensors: Sequence[FileTensor], max_shard_bytes: int) -> list[FileLayout]:
    """Assigns tensors to files in their order, as save_pretrained does, and makes the headers.

    Args:
        tensors: with different names.
        max_shard_bytes: largest size of a file's tensors, unless a single one is larger.
    """
    files: list[list[FileTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.nbytes > max_shard_bytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.nbytes
    if len(files) == 1:
        return [_layout(WEIGHTS, files[0])]
    return [
        _layout(f"model-{number:05}-of-{len(files):05}.safetensors", file)
        for number, file in enumerate(files, 1)
    ]


def _layout(name: str, tensors: Sequence[FileTensor]) -> FileLayout:
    # Tensors of the widest dtype first: each begins at a multiple of its element size.
    tensors = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # which transformers expects
    names = {dtype: name for name, dtype in dtypes().items()}
    offsets, position = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = position
        position += tensor.nbytes
        entries[tensor.name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[tensor.name], position],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + offset for name, offset in offsets.items()}
    return FileLayout(name, header, starts, len(header) + position)


def index_text(layouts: Sequence[FileLayout]) -> str:
    """Returns the index of several files, in JSON."""
    total = sum(layout.nbytes - len(layout.header) for layout in layouts)
    weight_map = {name: layout.name for layout in layouts for name in layout.starts}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)


def check_dtype(tensor: FileTensor) -> None:
    """Refuses a dtype that the format does not have.

    Raises:
        ValueError: naming the tensor.
    """
    if tensor.dtype not in dtypes().values():
        raise ValueError(
            f"save_safetensors: expected a dtype of safetensors for {tensor.name!r}, got "
            f"{tensor.dtype}; pass dtype=, or leave it out by a rename= that returns None for it"
        )
