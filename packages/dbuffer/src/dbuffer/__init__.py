"""A group of tensors in one distributed buffer."""

from dbuffer._compat import dtensor_of
from dbuffer.agreement import verify
from dbuffer.buffer import DBuffer
from dbuffer.collectives import Axis, Collectives, Handle, Strategy, collectives_for, own_row
from dbuffer.memory import (
    BufferMemory,
    MemoryPool,
    MemorySlice,
    PoolBlock,
    ResizableMemory,
    memory_size,
)
from dbuffer.placements import Inner

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "BufferMemory",
    "Collectives",
    "DBuffer",
    "Handle",
    "Inner",
    "MemoryPool",
    "MemorySlice",
    "PoolBlock",
    "ResizableMemory",
    "Strategy",
    "collectives_for",
    "dtensor_of",
    "memory_size",
    "own_row",
    "verify",
]
