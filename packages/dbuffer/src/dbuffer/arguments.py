"""What a buffer is made of, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from dbuffer.memory import BufferMemory, ResizableMemory
from dbuffer.placements import (
    Inner,
    LocalTensor,
    Placements,
    axis_index,
    checked_inner,
    checked_placements,
    is_sharded,
)
from dbuffer.tensor_lookup import index_of
from dbuffer.views import tensor_shape
from ragged_shard.planner import Layout

__all__ = ["Checked", "checked", "checked_memory"]


#: Bytes of which torch's allocators make every begin a multiple, the host's least of all.
ALLOCATOR_ALIGNMENT = 64


@dataclass(frozen=True)
class Checked:
    """Arguments of a buffer, complete and right."""

    placements: Placements
    shard_axis: int
    device: torch.device
    inner: Mapping[int, Inner]
    tensors: tuple[LocalTensor, ...]


def checked(
    layout: Layout,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    dtype: torch.dtype,
    device: torch.device | str | None,
    shard_axis: int | str | None,
    inner: Mapping[int | str, Inner] | None,
) -> Checked:
    """Checks the arguments of `DBuffer`."""
    for what, value, wanted in (
        ("layout", layout, Layout), ("mesh", mesh, DeviceMesh), ("dtype", dtype, torch.dtype),
    ):  # fmt: skip
        if not isinstance(value, wanted):
            raise ValueError(f"DBuffer: expected {what} to be a {wanted.__name__}, got {value!r}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"DBuffer: expected a rank of the mesh, got rank {dist.get_rank()}, which is not in "
            f"{mesh}; construct the buffer on the mesh's ranks only"
        )
    placements = tuple(placements)
    axis = _shard_axis(mesh, placements, shard_axis)
    placements = checked_placements(placements, mesh, axis)
    if layout.world_size != mesh.size(axis):
        raise ValueError(
            f"DBuffer: expected a layout of {mesh.size(axis)} shards, one for each rank of axis "
            f"{axis} of {mesh}, got {layout.world_size} shards; plan it with "
            f"world_size={mesh.size(axis)}, or give shard_axis="
        )
    found = {index_of(layout, key): other for key, other in (inner or {}).items()}
    tensors = [LocalTensor(tensor_shape(layout, i)) for i in range(len(layout.specs))]
    for i, other in found.items():
        what = f"tensor {i} ({layout.specs[i].name!r})"
        tensors[i] = checked_inner(other, mesh, tensors[i].shape, layout.specs[i].block, what)
    return Checked(placements, axis, _device(device, mesh), found, tuple(tensors))


def checked_memory(
    memory: BufferMemory | None,
    nbytes: int,
    device: torch.device,
    alignment: int,
    itemsize: int,
    *,
    pin_memory: bool,
) -> BufferMemory:
    """Acquires memory for a buffer: the argument's, or new memory.

    Raises:
        ValueError: the memory is too small, on another device or not aligned, or `pin_memory` is
            set with memory of the caller.
        RuntimeError: another buffer uses the memory.
    """
    if alignment < 1:
        raise ValueError(
            f"DBuffer: expected alignment to be a positive number of bytes, got {alignment!r}"
        )
    if memory is None:
        if alignment > ALLOCATOR_ALIGNMENT:
            raise ValueError(
                f"DBuffer: expected alignment of at most {ALLOCATOR_ALIGNMENT} bytes, which "
                f"torch's allocator has, got {alignment}; for more, give memory= of a MemoryPool "
                f"with that alignment"
            )
        memory = ResizableMemory(nbytes, device, pin_memory=pin_memory)
    elif pin_memory:
        raise ValueError(
            "DBuffer: expected pin_memory=False beside memory=, got True; pin that memory instead"
        )
    elif memory.bytes.numel() < nbytes or memory.bytes.device != device:
        raise ValueError(
            f"DBuffer: expected memory of at least {nbytes} bytes on {device}, got "
            f"{memory.bytes.numel()} on {memory.bytes.device}; memory_size() gives the size"
        )
    else:
        memory.acquire()
    begin, offset = memory.bytes.data_ptr(), memory.bytes.storage_offset()
    if begin % alignment or offset % itemsize:
        memory.release()
        raise ValueError(
            f"DBuffer: expected memory that begins at a multiple of alignment={alignment} and of "
            f"an element's {itemsize} bytes, got {begin:#x}, {offset} bytes into its storage; take "
            f"it from a MemoryPool with that alignment"
        )
    return memory


def _shard_axis(mesh: DeviceMesh, placements: Placements, shard_axis: int | str | None) -> int:
    if shard_axis is not None:
        return axis_index(mesh, shard_axis, "shard_axis")
    sharded = [axis for axis, p in enumerate(placements) if is_sharded(p)]
    return sharded[0] if sharded and sharded[0] < mesh.ndim else mesh.ndim - 1


def _device(device: torch.device | str | None, mesh: DeviceMesh) -> torch.device:
    # An empty tensor tells the index that "cuda" stands for.
    return torch.empty(0, device=mesh.device_type if device is None else device).device
