"""`save_safetensors`: each rank writes its boxes of a model's tensors into shared files."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp.checkpoint.folder import (
    INDEX,
    FileLayout,
    FileTensor,
    check_dtype,
    index_text,
    lay_out,
)
from fsdp.checkpoint.load import BUFFER_BYTES
from fsdp.checkpoint.names import (
    ModelTensor,
    Rename,
    TensorPart,
    is_in_replica_of,
    local_shard,
    model_tensors,
    pieces,
)
from fsdp.checkpoint.ranks import gather, global_rank, raised_on_all_ranks, rank_of
from ragged_shard.geometry.boxes import TensorBox, contiguous_strides


@dataclass(frozen=True)
class SaveResult:
    """What `save_safetensors` has written.

    Attributes:
        files: names of the files of weights, in the folder.
        total_bytes: of the tensors in them.
        bytes_written: of tensors, by this rank.
    """

    files: tuple[str, ...]
    total_bytes: int
    bytes_written: int


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    rename: Rename | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    buffer_bytes: int = BUFFER_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> SaveResult:
    """Writes the weights of a model as a folder for ``from_pretrained``; all ranks call it.

    All ranks write into the same files, each the boxes of its shards; ranks with the same ones take
    turns, tensor after tensor. No tensor data is sent. Beside its shards a rank has at most
    `buffer_bytes` in memory, and a copy of a local tensor that is not contiguous. Of tied
    parameters the first is written. ``config.json`` is not: call ``save_pretrained`` of the model's
    configuration and of the tokenizer.

    Files have other names until all of them are written, and the index is written last.

    Args:
        model: of plain tensors and DTensors of any placements; each rank may have other modules.
        folder: shared by all ranks; is created, and has no safetensors yet.
        rename: returns, for a name in the model, that in files; `TensorPart` for a tensor that is
            several in files; None for one that is not written.
        dtype: that floating-point tensors are cast to; None casts none.
        max_shard_bytes: largest size of a file's tensors, unless a single one is larger.
        buffer_bytes: the most that is copied at a time.
        process_group: of the ranks that call; by default all.

    Raises:
        ValueError: on every rank, before anything is written: the folder has weights already; two
            tensors have one name in files, or one differs in shape or dtype between ranks; a
            dtype is none of safetensors'; `dtype` is an integer one; a tensor is not reduced.
        OSError: the folder or a file cannot be written, or is not shared by all ranks.
    """
    path, rank = Path(folder), rank_of(process_group)
    with raised_on_all_ranks(process_group):
        sources = _sources(model, rename, dtype)
    on_ranks = gather({source.tensor.name: source.tensor for source in sources}, process_group)
    tensors = _merged(on_ranks)
    layouts = lay_out([found.tensor for found in tensors.values()], max_shard_bytes)
    with raised_on_all_ranks(process_group):
        if rank == 0:
            _create(path, layouts)
    with raised_on_all_ranks(process_group):
        written = [
            source
            for source in sources
            if source.is_written(tensors[source.tensor.name].writer, process_group)
        ]
        bytes_written = _write(path, layouts, written, buffer_bytes)
    with raised_on_all_ranks(process_group):
        if rank == 0:
            _publish(path, layouts)
    total = sum(found.tensor.nbytes for found in tensors.values())
    return SaveResult(tuple(layout.name for layout in layouts), total, bytes_written)


@dataclass(frozen=True)
class _OfAllRanks:
    """A tensor in a file, and the rank that writes it: ranks that have it take turns."""

    tensor: FileTensor
    writer: int


@dataclass(frozen=True, eq=False)
class _Source:
    """A tensor in a file, and the box of a model's tensor that it is."""

    tensor: FileTensor
    part: TensorPart
    model: ModelTensor

    def is_written(self, writer: int, process_group: dist.ProcessGroup | None) -> bool:
        """Returns whether this rank writes its boxes of it.

        Args:
            writer: rank in the group that writes; of a DTensor all ranks of its replica do.
            process_group: of `save_safetensors`.
        """
        if not isinstance(self.model.tensor, DTensor):
            return rank_of(process_group) == writer
        return is_in_replica_of(self.model.tensor, global_rank(writer, process_group))


def _sources(model: nn.Module, rename: Rename | None, dtype: torch.dtype | None) -> list[_Source]:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"save_safetensors: expected a floating-point dtype for floating-point tensors, got "
            f"dtype={dtype}; pass torch.bfloat16, for instance, or None to cast none"
        )
    sources: dict[str, _Source] = {}
    for tensor in model_tensors(model, rename):
        local_shard(tensor.tensor, tensor.name)  # refuses those that are not reduced
        own = tensor.tensor.dtype
        file_dtype = dtype if dtype is not None and own.is_floating_point else own
        for part in tensor.files[0]:
            made = FileTensor(part.name, part.shape, file_dtype)
            check_dtype(made)
            if part.name in sources:
                raise ValueError(
                    f"save_safetensors: expected different names in files, got {part.name!r} for "
                    f"{sources[part.name].model.name!r} and {tensor.name!r}; change rename="
                )
            sources[part.name] = _Source(made, part, tensor)
    return list(sources.values())


def _merged(on_ranks: Sequence[Mapping[str, FileTensor]]) -> dict[str, _OfAllRanks]:
    """Returns the tensors of all ranks by name, in the order of the ranks' models.

    Raises:
        ValueError: ranks have other shapes or dtypes; all ranks raise it.
    """
    found: dict[str, FileTensor] = {}
    ranks_with: dict[str, list[int]] = {}
    for rank, tensors in enumerate(on_ranks):
        for name, tensor in tensors.items():
            first = found.setdefault(name, tensor)
            ranks_with.setdefault(name, []).append(rank)
            if first != tensor:
                raise ValueError(
                    f"save_safetensors: expected one shape and dtype of {name!r} on all ranks, got "
                    f"{first.shape} and {first.dtype} on rank {ranks_with[name][0]}, "
                    f"{tensor.shape} and {tensor.dtype} on rank {rank}; rename tensors of a rank's "
                    f"own by rename="
                )
    return {
        name: _OfAllRanks(tensor, ranks_with[name][number % len(ranks_with[name])])
        for number, (name, tensor) in enumerate(found.items())
    }


def _create(folder: Path, layouts: Sequence[FileLayout]) -> None:
    """Creates the files under their names until they are complete, with headers and sizes."""
    old = sorted(folder.glob("*.safetensors")) + sorted(folder.glob(INDEX))
    if old:
        raise ValueError(
            f"save_safetensors: expected a folder without weights, got {folder} with "
            f"{old[0].name}; remove it, or give another folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for partial in folder.glob(".*.partial"):  # left by ranks that were killed
        partial.unlink()
    for layout in layouts:
        with open(_partial(folder, layout), "wb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)


def _partial(folder: Path, layout: FileLayout) -> Path:
    return folder / f".{layout.name}.partial"


def _publish(folder: Path, layouts: Sequence[FileLayout]) -> None:
    for layout in layouts:
        _partial(folder, layout).rename(folder / layout.name)
    if len(layouts) > 1:
        partial = folder / f".{INDEX}.partial"
        partial.write_text(index_text(layouts))
        partial.rename(folder / INDEX)


def _write(
    folder: Path, layouts: Sequence[FileLayout], sources: Sequence[_Source], buffer_bytes: int
) -> int:
    """Writes this rank's boxes, one file after another; returns the bytes of tensors."""
    by_name = {source.tensor.name: source for source in sources}
    written = 0
    for layout in layouts:
        in_file = [name for name in layout.starts if name in by_name]
        if not in_file:
            continue
        with open(_partial(folder, layout), "r+b") as file:
            for name in in_file:
                written += _write_part(file, layout.starts[name], by_name[name], buffer_bytes)
            file.flush()
            os.fsync(file.fileno())
    return written


def _write_part(file: BinaryIO, start: int, source: _Source, buffer_bytes: int) -> int:
    shard = local_shard(source.model.tensor, source.model.name)
    flat = shard.local.detach().contiguous().view(-1)
    dtype, part = source.tensor.dtype, source.part
    elements = buffer_bytes // max(dtype.itemsize, flat.dtype.itemsize)
    written = 0
    for stored in shard.boxes:
        common = stored.box.intersect(part.box)
        for box in () if common is None else pieces(common, elements):
            window = stored.window_of(box)
            offset = flat.storage_offset() + window.offset
            values = torch.empty(box.sizes, dtype=dtype, device="cpu")
            values.copy_(flat.as_strided(window.sizes, window.strides, offset))
            in_part = box.shift([-n for n in part.offsets])
            for run in _runs(in_part, part.sizes):
                file.seek(start + run.start * dtype.itemsize)
                file.write(_bytes(values.view(-1)[run.first : run.first + run.length]))
            written += values.nbytes
    return written


@dataclass(frozen=True)
class _Run:
    """Elements that are contiguous in a tensor and in a box of it.

    Attributes:
        start: index of the first element in the flattened tensor.
        first: its index in the flattened box.
        length: number of elements.
    """

    start: int
    first: int
    length: int


def _runs(box: TensorBox, shape: Sequence[int]) -> Iterator[_Run]:
    """Yields the contiguous runs of a box, in row-major order."""
    strides = contiguous_strides(shape)
    inner = len(shape)
    while inner and box.sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # the dims before it are iterated over
    length = math.prod(box.sizes[outer:])
    begin = sum(n * s for n, s in zip(box.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, box.sizes[:outer]))):
        start = begin + sum(n * s for n, s in zip(index, strides, strict=False))
        yield _Run(start, number * length, length)


def _bytes(values: torch.Tensor) -> memoryview:
    array: Any = values.view(torch.uint8).numpy()
    return memoryview(array)
