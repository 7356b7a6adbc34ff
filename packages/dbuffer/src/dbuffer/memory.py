"""The memory of buffers: released and acquired again, ordered by events; pools of it.

Note: a tensor stays valid through a release because tensors refer to a *storage*, and it is the
storage that changes size. Everything that autograd saved of a view, `weight.t()` included, shares
that storage, so it reads what the next gather writes. Replacing a tensor's storage (`set_`) would
miss what was derived from it. (As FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param.py.)

Note: the words of memory.
    slab: one allocation of torch's allocator.
    block: a part of a slab, for one buffer or for several that use it in turns.
    taken: given out by the pool, until it is given back.
    allocated: in use by a buffer. A taken block may be acquired and released many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ragged_shard.planner import Layout

__all__ = [
    "BufferMemory",
    "Lease",
    "MemoryPool",
    "MemorySlice",
    "PoolBlock",
    "PoolReport",
    "ResizableMemory",
    "memory_size",
]


class BufferMemory(Protocol):
    """Bytes that a buffer can acquire, release and acquire again."""

    @property
    def bytes(self) -> torch.Tensor:
        """uint8, one-dimensional: always the same tensor on the same storage."""
        ...

    @property
    def allocated(self) -> bool:
        """Whether a buffer uses it, so that it may be read and written."""
        ...

    def acquire(self) -> None:
        """Acquires it for the current stream, not initialised. Raises if a buffer uses it."""
        ...

    def release(self, *, keep_storage: bool = False) -> None:
        """Releases it once the current stream has done its work; storage kept has its address."""
        ...


class ResizableMemory:
    """Memory of its own that goes back to torch's allocator when it is released.

    On a GPU no `record_stream` is needed: the stream that allocated waits for the one that
    released, and only then does the block go back to that stream's free list, at a known moment.

    Args:
        nbytes: how many bytes.
        device: where.
        pin_memory: page-locked memory of the host, for copies that overlap.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pin_memory: bool = False) -> None:
        # (nbytes,), uint8; the views of a DBuffer share its storage
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self.allocated = True
        self._nbytes = nbytes
        self._stream = current_stream(device)  # that allocated it
        self._released: Any = None  # event: the last user of storage that was kept has done

    def acquire(self) -> None:
        """Allocates it again; see `BufferMemory.acquire`.

        Raises:
            RuntimeError: a buffer uses it.
        """
        if self.allocated:
            raise RuntimeError(
                "ResizableMemory.acquire: expected free memory, got memory that a buffer uses; "
                "release() that buffer first"
            )
        storage, stream = self.bytes.untyped_storage(), current_stream(self.bytes.device)
        if storage.nbytes() == self._nbytes:  # a release kept it; resize_ would copy it
            if self._released is not None:
                stream.wait_event(self._released)
        else:
            storage.resize_(self._nbytes)
            before, self._stream = self._stream, stream
            # That stream has waited for the release. What was copied out before the release is thus
            # complete for this one, too, as fsdp's gather over fewer ranks relies on.
            if before is not None:
                stream.wait_stream(before)
        self.allocated = True

    def release(self, *, keep_storage: bool = False) -> None:
        """Returns it to the allocator; see `BufferMemory.release`.

        Args:
            keep_storage: whether it stays allocated, so that its address is the same when it is
                acquired again, as CUDA graphs need it.
        """
        if not self.allocated:
            return
        if self._stream is not None:
            self._released = current_stream(self.bytes.device).record_event()
            self._stream.wait_event(self._released)
        if not keep_storage:
            self.bytes.untyped_storage().resize_(0)
        self.allocated = False


class MemorySlice:
    """A range of other memory, for a buffer within another buffer's memory.

    The owner of that memory acquires and releases it; here is only counted which buffer uses the
    range. Its content is valid while the memory is allocated, and it moves with the memory.

    Args:
        memory: allocated.
        start: bytes.
        nbytes: how many bytes.
    """

    def __init__(self, memory: BufferMemory, start: int, nbytes: int) -> None:
        # (nbytes,), uint8, of the memory's storage
        self.bytes = memory.bytes[start : start + nbytes]
        self.allocated = False

    def acquire(self) -> None:
        """Counts a buffer as the one that uses it.

        Raises:
            RuntimeError: another one does.
        """
        if self.allocated:
            raise RuntimeError(
                "MemorySlice.acquire: expected a free slice, got one that a buffer uses; release() "
                "that buffer first"
            )
        self.allocated = True

    def release(self, *, keep_storage: bool = False) -> None:
        """Lets another buffer use it; the memory stays as it is."""
        self.allocated = False


def current_stream(device: torch.device) -> Any:
    """Returns the device's current stream; None for devices without streams."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device).current_stream(device)


@dataclass(frozen=True)
class PoolReport:
    """Bytes of a pool.

    Attributes:
        slabs: how many there are.
        reserved: bytes of the slabs, which torch's allocator gave.
        peak_reserved: the most there were.
        allocated: bytes of blocks in use.
        peak_allocated: the most there were.
    """

    slabs: int
    reserved: int
    peak_reserved: int
    allocated: int
    peak_allocated: int

    def __str__(self) -> str:
        return (
            f"{self.slabs} slabs, {self.reserved:,} bytes (peak {self.peak_reserved:,}); in use "
            f"{self.allocated:,} (peak {self.peak_allocated:,})"
        )


class PoolBlock:
    """A part of a slab; `BufferMemory` whose address never changes, and that buffers use in turns.

    A release records an event on the current stream, and the next holder's stream waits for it:
    no `record_stream`, and no guess at when memory is free.
    """

    def __init__(self, pool: MemoryPool, slab: int, data: torch.Tensor) -> None:
        # (size,), uint8, the slab's
        self.bytes = data
        self.allocated = False
        self._pool, self._slab = pool, slab
        self._event: Any = None

    def acquire(self) -> None:
        """Acquires it; the current stream waits for the work of the buffers before.

        Raises:
            RuntimeError: a buffer uses it, or it was given back.
        """
        if self not in self._pool._taken:
            raise RuntimeError(
                "PoolBlock.acquire: expected a taken block, got one given back; take() another"
            )
        if self.allocated:
            raise RuntimeError(
                f"PoolBlock.acquire: expected a free block, got one of {self.bytes.numel()} bytes "
                f"that a buffer uses; release() that buffer first, or take() another block"
            )
        self._wait()
        self.allocated = True
        self._pool._count(self.bytes.numel())

    def release(self, *, keep_storage: bool = False) -> None:
        """Lets others acquire it, once the current stream has done its work.

        Its address is always the same, so `keep_storage` makes no difference.
        """
        if self.allocated:
            stream = current_stream(self.bytes.device)
            self._event = None if stream is None else stream.record_event()
            self.allocated = False
            self._pool._count(-self.bytes.numel())

    def _wait(self) -> None:
        if self._event is not None:
            current_stream(self.bytes.device).wait_event(self._event)


@dataclass(frozen=True, eq=False)
class Lease:
    """A flat tensor in a block: what fused-comm calls a FlatBuffer.

    Attributes:
        data: of one dim, of the elements and dtype that were asked.
    """

    data: torch.Tensor
    _block: PoolBlock

    def release(self) -> None:
        """Gives the block back to its pool."""
        self._block.release()
        self._block._pool.give_back(self._block)


class MemoryPool:
    """Gives blocks out of slabs, takes them back, and says how many bytes there are.

    Args:
        device: of the memory.
        alignment: bytes of which every block's begin is a multiple: a power of two.
        pin_memory: page-locked memory of the host.

    Raises:
        ValueError: an alignment that is no power of two.
    """

    def __init__(
        self, device: torch.device | str, *, alignment: int = 16, pin_memory: bool = False
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(
                f"MemoryPool: expected alignment to be a power of two, in bytes, got {alignment}"
            )
        self.device = torch.empty(0, device=device).device
        self.alignment = alignment
        self._pin_memory = pin_memory
        self._slabs: dict[int, list[PoolBlock]] = {}  # by number: all blocks, in order
        self._streams: dict[int, Any] = {}  # by number: the stream that allocated it
        self._reserved: dict[int, int] = {}  # by number: bytes
        self._taken: set[PoolBlock] = set()
        self._made = self._allocated = self._peak_allocated = self._peak_reserved = 0

    def take(self, nbytes: int) -> PoolBlock:
        """Returns a block of `nbytes` or more: the smallest free one that wastes less than half.

        Raises:
            ValueError: a negative size.
        """
        size = self._rounded(nbytes)
        free = [
            block
            for blocks in self._slabs.values()
            for block in blocks
            if block not in self._taken and size <= block.bytes.numel() < 2 * size
        ]
        if not free:
            return self.take_many([nbytes])[0]
        found = min(free, key=lambda block: block.bytes.numel())  # the oldest of the smallest
        self._taken.add(found)
        return found

    def take_many(self, sizes: Sequence[int]) -> tuple[PoolBlock, ...]:
        """Blocks of one new slab: one allocation, whatever their number.

        Args:
            sizes: bytes of each.

        Raises:
            ValueError: a negative size.
        """
        rounded = [self._rounded(nbytes) for nbytes in sizes]
        room = sum(rounded) + self.alignment - 1
        slab = torch.empty(room, dtype=torch.uint8, device=self.device, pin_memory=self._pin_memory)
        start, number = -slab.data_ptr() % self.alignment, self._made
        blocks = []
        for size in rounded:
            blocks.append(PoolBlock(self, number, slab[start : start + size]))
            start += size
        self._made += 1
        self._slabs[number] = blocks
        self._streams[number] = current_stream(self.device)
        self._reserved[number] = room
        self._taken.update(blocks)
        self._peak_reserved = max(self._peak_reserved, sum(self._reserved.values()))
        return tuple(blocks)

    def give_back(self, block: PoolBlock) -> None:
        """Lets the pool give the block to others; its slab stays until `trim`.

        Raises:
            ValueError: not a block that this pool gave out.
            RuntimeError: a buffer uses it.
        """
        if block not in self._taken:
            raise ValueError(
                "MemoryPool.give_back: expected a taken block of this pool, got one of another "
                "pool or one given back before"
            )
        if block.allocated:
            raise RuntimeError(
                "MemoryPool.give_back: expected a free block, got one that a buffer uses; "
                "release() that buffer first"
            )
        self._taken.remove(block)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Lease:
        """Allocates a flat tensor that its `release` frees; this is fused-comm's `Allocate`.

        Args:
            numel: elements of the tensor.
            dtype: of the tensor.
            device: of the tensor, which has to be the pool's.

        Raises:
            ValueError: another device than the pool's.
        """
        if torch.device(device).type != self.device.type:
            raise ValueError(
                f"MemoryPool.allocate: expected device {self.device}, the pool's, got {device}"
            )
        block = self.take(numel * dtype.itemsize)
        block.acquire()
        return Lease(block.bytes[: numel * dtype.itemsize].view(dtype), block)

    def trim(self) -> int:
        """Returns slabs of which no block is taken to torch's allocator; the bytes.

        The stream that allocated a slab waits for those that used it, so the allocator may give
        the memory away at once. Tensors that are still in a slab keep it alive.
        """
        freed = 0
        for number in [n for n, blocks in self._slabs.items() if self._taken.isdisjoint(blocks)]:
            stream = self._streams.pop(number)
            for block in self._slabs.pop(number):
                if block._event is not None:
                    stream.wait_event(block._event)
            freed += self._reserved.pop(number)
        return freed

    def report(self) -> PoolReport:
        """Bytes now, and at the most."""
        reserved = sum(self._reserved.values())
        return PoolReport(
            len(self._slabs), reserved, self._peak_reserved, self._allocated, self._peak_allocated
        )

    def _count(self, nbytes: int) -> None:
        self._allocated += nbytes
        self._peak_allocated = max(self._peak_allocated, self._allocated)

    def _rounded(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"MemoryPool: expected a block of 0 or more bytes, got {nbytes}")
        return -(-nbytes // self.alignment) * self.alignment


def memory_size(layout: Layout, dtype: torch.dtype, *, full: bool = False) -> int:
    """Returns the bytes that a `DBuffer` needs.

    Args:
        layout: of the buffer.
        dtype: of the buffer.
        full: whether for all shards, instead of this rank's.
    """
    return (layout.buffer_size if full else layout.shard_size) * dtype.itemsize
