"""Memory for several buffers at once, in few large pieces that are used again.

Note: the words of memory.
    slab: one allocation of torch's allocator.
    block: a part of a slab, for one buffer or for several that hold it in turns.
    taken: given out by the pool, until it is given back.
    held: in use by a buffer; see memory.py. A taken block may be held and released many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbuffer.memory import current_stream
from ragged_shard.planner import Layout

__all__ = ["Block", "Lease", "MemoryPool", "PoolReport", "memory_size"]


@dataclass(frozen=True)
class PoolReport:
    """Bytes of a pool.

    Attributes:
        slabs: how many there are.
        reserved: bytes of the slabs, which torch's allocator gave.
        peak_reserved: the most there were.
        held: bytes of blocks in use.
        peak_held: the most there were.
    """

    slabs: int
    reserved: int
    peak_reserved: int
    held: int
    peak_held: int

    def __str__(self) -> str:
        return (
            f"{self.slabs} slabs, {self.reserved:,} bytes (peak {self.peak_reserved:,}); in use "
            f"{self.held:,} (peak {self.peak_held:,})"
        )


class Block:
    """A part of a slab; `Memory` whose address never changes, and that buffers hold in turns.

    A release records an event on the current stream, and the next holder's stream waits for it:
    no `record_stream`, and no guess at when memory is free.
    """

    def __init__(self, pool: MemoryPool, slab: int, data: torch.Tensor) -> None:
        # (size,), uint8, the slab's
        self.bytes = data
        self.held = False
        self._pool, self._slab = pool, slab
        self._event: Any = None

    def acquire(self) -> None:
        """Holds it; the current stream waits for the work of those who had it before.

        Raises:
            RuntimeError: somebody holds it, or it was given back.
        """
        if self not in self._pool._taken:
            raise RuntimeError("Block.acquire: it was given back to its pool; take() another")
        if self.held:
            raise RuntimeError(
                f"Block.acquire: a buffer holds this block of {self.bytes.numel()} bytes; "
                f"release() that buffer first, or take() another block"
            )
        self._wait()
        self.held = True
        self._pool._count(self.bytes.numel())

    def release(self) -> None:
        """Lets others hold it, once the current stream has done what it was given until now."""
        if self.held:
            stream = current_stream(self.bytes.device)
            self._event = None if stream is None else stream.record_event()
            self.held = False
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
    _block: Block

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
            raise ValueError(f"MemoryPool: alignment={alignment}; wants a power of two of bytes")
        self.device = torch.empty(0, device=device).device
        self.alignment = alignment
        self._pin_memory = pin_memory
        self._slabs: dict[int, list[Block]] = {}  # by number: all blocks, in order
        self._homes: dict[int, Any] = {}  # by number: the stream that allocated it
        self._reserved: dict[int, int] = {}  # by number: bytes
        self._taken: set[Block] = set()
        self._made = self._held = self._peak_held = self._peak_reserved = 0

    def take(self, nbytes: int) -> Block:
        """A block of at least so many bytes: the smallest free one that wastes less than half.

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

    def take_many(self, sizes: Sequence[int]) -> tuple[Block, ...]:
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
            blocks.append(Block(self, number, slab[start : start + size]))
            start += size
        self._made += 1
        self._slabs[number] = blocks
        self._homes[number] = current_stream(self.device)
        self._reserved[number] = room
        self._taken.update(blocks)
        self._peak_reserved = max(self._peak_reserved, sum(self._reserved.values()))
        return tuple(blocks)

    def give_back(self, block: Block) -> None:
        """Lets the pool give the block to others; its slab stays until `trim`.

        Raises:
            ValueError: not a block that this pool gave out.
            RuntimeError: a buffer holds it.
        """
        if block not in self._taken:
            raise ValueError("MemoryPool.give_back: this block was given back, or another pool's")
        if block.held:
            raise RuntimeError("MemoryPool.give_back: a buffer holds the block; release() it first")
        self._taken.remove(block)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Lease:
        """A flat tensor, to be released by its `release`; fused-comm's `Allocate`.

        Raises:
            ValueError: another device than the pool's.
        """
        if torch.device(device).type != self.device.type:
            raise ValueError(f"MemoryPool.allocate: device={device}; the pool is on {self.device}")
        block = self.take(numel * dtype.itemsize)
        block.acquire()
        return Lease(block.bytes[: numel * dtype.itemsize].view(dtype), block)

    def trim(self) -> int:
        """Returns slabs of which no block is taken to torch's allocator; the bytes.

        The stream that allocated a slab waits for those that used it, so the allocator may give
        the memory away at once. Tensors that still lie in a slab keep it alive.
        """
        freed = 0
        for number in [n for n, blocks in self._slabs.items() if self._taken.isdisjoint(blocks)]:
            home = self._homes.pop(number)
            for block in self._slabs.pop(number):
                if block._event is not None:
                    home.wait_event(block._event)
            freed += self._reserved.pop(number)
        return freed

    def report(self) -> PoolReport:
        """Bytes now, and at the most."""
        reserved = sum(self._reserved.values())
        return PoolReport(
            len(self._slabs), reserved, self._peak_reserved, self._held, self._peak_held
        )

    def _count(self, nbytes: int) -> None:
        self._held += nbytes
        self._peak_held = max(self._peak_held, self._held)

    def _rounded(self, nbytes: int) -> int:
        if nbytes < 0:
            raise ValueError(f"MemoryPool: a block of {nbytes} bytes; wants 0 or more")
        return -(-nbytes // self.alignment) * self.alignment


def memory_size(layout: Layout, dtype: torch.dtype, *, full: bool = False) -> int:
    """Bytes that a `DBuffer` needs: of its shard, or with `full` of all shards."""
    return (layout.buffer_size if full else layout.shard_size) * dtype.itemsize
