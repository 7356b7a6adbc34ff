"""A group of tensors in one distributed buffer."""

from dbuffer.buffer import DBuffer
from dbuffer.handle import Handle
from dbuffer.memory import Memory, ResizableMemory
from dbuffer.placing import Inner

__version__ = "0.1.0"

__all__ = ["DBuffer", "Handle", "Inner", "Memory", "ResizableMemory"]
