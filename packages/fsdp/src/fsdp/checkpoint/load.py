"""`load_safetensors`: each rank copies its boxes of a model's tensors from files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp.checkpoint.folder import StoredTensor, read_headers
from fsdp.checkpoint.names import (
    LocalShard,
    ModelTensor,
    Rename,
    TensorPart,
    local_shard,
    model_tensors,
    pieces,
)
from fsdp.checkpoint.ranks import gather, raised_on_all_ranks

BUFFER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class LoadResult:
    """What `load_safetensors` has done.

    Attributes:
        bytes_read: of tensors, by this rank, in the dtypes of the files.
        missing: tensors of this rank's model that the folder does not have.
        unexpected: tensors of the folder that no rank's model has.
    """

    bytes_read: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def check_safetensors(
    model: nn.Module, folder: str | Path, *, rename: Rename | None = None, strict: bool = True
) -> None:
    """Checks that a folder has the weights of a model; it reads headers, in this process only.

    Args:
        model: may be on meta.
        folder: as of `load_safetensors`.
        rename: as of `load_safetensors`.
        strict: as of `load_safetensors`.

    Raises:
        ValueError: as `load_safetensors`.
    """
    source = _match(model, Path(folder), read_headers(Path(folder)), rename)
    if strict:
        _check_names(source.folder, source.missing, source.unexpected([source.used]))


def load_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    buffer_bytes: int = BUFFER_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> LoadResult:
    """Loads the weights of a folder of safetensors into a model; all ranks call it.

    A rank reads the boxes of its shards, for plain tensors and DTensors of any placements, and
    writes them in place, cast to the dtype of the parameter. Beside the shards it has at most
    `buffer_bytes` in memory, and a copy of a local tensor that is not contiguous. Names are those
    of the one-device model; wrappers of DDP, activation checkpointing and torch.compile have none.

    A model on meta is allocated on the device of its mesh, or torch's default device: parameters
    and persistent buffers. The shards of one group are there twice for a moment, as by
    ``to_empty``. Optimizers are made afterwards.

    Of tied parameters a folder has one name or several.

    Args:
        model: of which each rank may have other modules, as in a pipeline.
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        rename: returns, for a name in the model, that in files; `TensorPart` for a tensor that is
            several in files; None for one that is not loaded.
        strict: whether tensors that are missing in the folder, or in the model, are an error.
        buffer_bytes: the most that is copied at a time.
        process_group: of the ranks that call; by default all.

    Returns:
        the bytes read, and with ``strict=False`` the names that were not loaded. Missing tensors of
        a model that was on meta have undefined values.

    Raises:
        ValueError: on every rank, before weights are read or anything is allocated: there is no
            such folder, or a file is damaged; a tensor is missing, unexpected, or of another shape;
            integers would be loaded into floating-point numbers or the reverse; a buffer on meta is
            not persistent, so that no file has its values.
        OSError: a file could not be read.
    """
    with raised_on_all_ranks(process_group):
        source = _match(model, Path(folder), read_headers(Path(folder)), rename)
        _check_buffers(model)
    unexpected = source.unexpected(gather(source.used, process_group))
    with raised_on_all_ranks(process_group):
        if strict:
            _check_names(source.folder, source.missing, unexpected)
    with raised_on_all_ranks(process_group):
        if _allocate(model):
            source = _match(model, source.folder, source.stored, rename)
        bytes_read = _read(source.targets, source.stored, buffer_bytes)
        # Hooks of modules see the values, and tensors that a state dict has copied are loaded.
        state: dict[str, Any] = {
            name: t.model.tensor for t in source.targets for name in t.model.names
        }
        set_model_state_dict(model, state, options=StateDictOptions(strict=False))
    return LoadResult(bytes_read, source.missing, unexpected)


@dataclass(frozen=True, eq=False)
class _Target:
    """A tensor of the model, and its parts in files."""

    model: ModelTensor
    parts: Sequence[TensorPart]


@dataclass(frozen=True, eq=False)
class _Source:
    """The headers of a folder, matched with a model.

    Attributes:
        stored: headers by name.
        targets: tensors of the model that the folder has.
        missing: names in files that it lacks.
        used: names in files of the model's tensors, those of all tied parameters.
    """

    folder: Path
    stored: Mapping[str, StoredTensor]
    targets: Sequence[_Target]
    missing: tuple[str, ...]
    used: frozenset[str]

    def unexpected(self, used: Iterable[frozenset[str]]) -> tuple[str, ...]:
        """Returns the names of the folder that none of these have."""
        return tuple(sorted(self.stored.keys() - frozenset().union(*used)))


def _match(
    model: nn.Module, folder: Path, stored: Mapping[str, StoredTensor], rename: Rename | None
) -> _Source:
    targets, missing, used = [], [], set()
    for tensor in model_tensors(model, rename):
        used |= {part.name for parts in tensor.files for part in parts}
        found = [parts for parts in tensor.files if all(part.name in stored for part in parts)]
        for parts in found:
            for part in parts:
                _check_part(folder, tensor, part, stored[part.name])
        if found:
            targets.append(_Target(tensor, found[0]))
        else:
            missing += [part.name for part in tensor.files[0] if part.name not in stored]
    return _Source(folder, stored, targets, tuple(missing), frozenset(used))


def _check_part(folder: Path, tensor: ModelTensor, part: TensorPart, stored: StoredTensor) -> None:
    if stored.shape != part.shape:
        raise ValueError(
            f"load_safetensors: expected {part.name!r} of shape {part.shape} in {folder}, for "
            f"{tensor.name!r} of this model, got {stored.shape}; load another folder or model"
        )
    if stored.dtype.is_floating_point != tensor.tensor.dtype.is_floating_point:
        raise ValueError(
            f"load_safetensors: expected {part.name!r} in {folder} to have a dtype like "
            f"{tensor.tensor.dtype}, that of {tensor.name!r}, got {stored.dtype}; load another "
            f"folder, or leave it out by a rename= that returns None for it"
        )


def _check_names(folder: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    if missing:
        raise ValueError(
            f"load_safetensors: expected the tensor {missing[0]!r} in {folder}, got none"
            f"{_more(missing)}; load another folder, pass rename=, or strict=False"
        )
    if unexpected:
        raise ValueError(
            f"load_safetensors: expected the tensors of this model in {folder}, got "
            f"{unexpected[0]!r}{_more(unexpected)}, which it does not have; load another folder, "
            f"pass rename=, or strict=False"
        )


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_buffers(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                full = f"{prefix}.{name}" if prefix else name
                raise ValueError(
                    f"load_safetensors: expected values of the buffer {full!r}, which is not "
                    f"persistent and so in no file, got it on meta; compute it first, or construct "
                    f"its module on a device"
                )


def _allocate(model: nn.Module) -> bool:
    """Allocates what is on meta, tied parameters once; returns whether there was any."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return False
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    device = torch.device(meshes[0].device_type) if meshes else torch.get_default_device()
    if device.type in ("cpu", "meta"):
        device = torch.device("cpu")
    else:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    tied: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, param in module._parameters.items():
            tied[id(param)].append((module, name))
    model._apply(
        lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    for (first, first_name), *others in tied.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]
    return True


def _read(targets: Sequence[_Target], stored: Mapping[str, StoredTensor], buffer_bytes: int) -> int:
    """Copies this rank's boxes from the files, one file after another; returns the bytes."""
    from safetensors import safe_open

    by_file: dict[Path, list[tuple[_Target, TensorPart]]] = defaultdict(list)
    for target in targets:
        for part in target.parts:
            by_file[stored[part.name].file].append((target, part))
    bytes_read = 0
    for file, items in by_file.items():
        # It maps the file into memory, so that a slice reads no more than its pages. Its tensors
        # are made on the default device, which a context may have set to meta.
        with torch.device("cpu"), safe_open(file, framework="pt") as opened:
            for target, part in items:
                shard = local_shard(target.model.tensor, target.model.name)
                widest = max(stored[part.name].dtype.itemsize, shard.local.dtype.itemsize)
                values = opened.get_slice(part.name)
                bytes_read += _read_part(values, shard, part, buffer_bytes // widest)
    return bytes_read


def _read_part(opened: object, shard: LocalShard, part: TensorPart, elements: int) -> int:
    contiguous = shard.local.detach().contiguous()
    flat = contiguous.view(-1)
    bytes_read = 0
    for stored in shard.boxes:
        common = stored.box.intersect(part.box)
        for box in () if common is None else pieces(common, elements):
            # An expert's matrix has no dim of experts in the file.
            bounds = list(zip(box.offsets, part.offsets, box.sizes, strict=True))
            slices = tuple(slice(a - b, a - b + n) for a, b, n in bounds)
            values = opened[slices[len(slices) - len(part.shape) :]]  # type: ignore[index]
            window = stored.window_of(box)
            start = flat.storage_offset() + window.offset
            flat.as_strided(window.sizes, window.strides, start).copy_(values.view(box.sizes))
            bytes_read += values.nbytes
    if not shard.local.is_contiguous():
        shard.local.detach().copy_(contiguous)
    return bytes_read
