"""What a buffer is made of, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from dbuffer.memory import BufferMemory, ResizableMemory
from dbuffer.placements import (
    Inner,
    Placements,
    axis_index,
    check_inner,
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
            raise ValueError(f"DBuffer: {what}={value!r}; expected a {wanted.__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"DBuffer: this rank is not in {mesh}; only the mesh's ranks may make the buffer"
        )
    placements = tuple(placements)
    axis = _shard_axis(mesh, placements, shard_axis)
    placements = checked_placements(placements, mesh, axis)
    if layout.world_size != mesh.size(axis):
        raise ValueError(
            f"DBuffer: the layout has {layout.world_size} shards and axis {axis} of {mesh} has "
            f"{mesh.size(axis)} ranks; plan it with world_size={mesh.size(axis)}, or give "
            f"shard_axis="
        )
    found = {index_of(layout, key): other for key, other in (inner or {}).items()}
    for i, other in found.items():
        check_inner(other, mesh, tensor_shape(layout, i), f"tensor {i} ({layout.specs[i].name!r})")
    return Checked(placements, axis, _device(device, mesh), found)


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
        raise ValueError(f"DBuffer: alignment={alignment!r}; expected a positive number of bytes")
    if memory is None:
        if alignment > ALLOCATOR_ALIGNMENT:
            raise ValueError(
                f"DBuffer: alignment={alignment}; torch's allocator keeps to {ALLOCATOR_ALIGNMENT} "
                f"bytes, so for more give memory= of a MemoryPool with that alignment"
            )
        memory = ResizableMemory(nbytes, device, pin_memory=pin_memory)
    elif pin_memory:
        raise ValueError("DBuffer: pin_memory=True and memory=; pin the memory that you give")
    elif memory.bytes.numel() < nbytes or memory.bytes.device != device:
        raise ValueError(
            f"DBuffer: memory of {memory.bytes.numel()} bytes on {memory.bytes.device}; expected "
            f"at least {nbytes} on {device}"
        )
    else:
        memory.acquire()
    begin, offset = memory.bytes.data_ptr(), memory.bytes.storage_offset()
    if begin % alignment or offset % itemsize:
        memory.release()
        raise ValueError(
            f"DBuffer: memory that begins at {begin:#x}, {offset} bytes into its storage; expected "
            f"multiples of alignment={alignment} and of an element's {itemsize} bytes"
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
