"""A group of tensors in one distributed buffer."""

from dbuffer.agree import verify
from dbuffer.buffer import DBuffer
from dbuffer.collectives import Axis, Collectives, Strategy, collectives_for, own_row
from dbuffer.handle import Handle
from dbuffer.memory import Memory, ResizableMemory
from dbuffer.placing import Inner
from dbuffer.pool import Block, MemoryPool, memory_size

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Block",
    "Collectives",
    "DBuffer",
    "Handle",
    "Inner",
    "Memory",
    "MemoryPool",
    "ResizableMemory",
    "Strategy",
    "collectives_for",
    "memory_size",
    "own_row",
    "verify",
]
