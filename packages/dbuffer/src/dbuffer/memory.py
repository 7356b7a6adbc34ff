"""The memory that a buffer lies in: released and acquired again, ordered by events.

Note: a tensor stays valid through a release because tensors refer to a *storage*, and it is the
storage that changes size. Everything that autograd saved of a view, `weight.t()` included, shares
that storage, so it reads what the next gather writes. Replacing a tensor's storage (`set_`) would
miss what was derived from it. (As FSDP2, torch/distributed/fsdp/_fully_shard/_fsdp_param.py.)
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Memory", "ResizableMemory"]


class Memory(Protocol):
    """Bytes that a buffer can hold, give away and hold again."""

    @property
    def bytes(self) -> torch.Tensor:
        """uint8, one-dimensional: always the same tensor on the same storage."""
        ...

    @property
    def held(self) -> bool:
        """Whether somebody holds it, so that it may be read and written."""
        ...

    def acquire(self) -> None:
        """Holds it, for the current stream; its content is anything. Raises if somebody does."""
        ...

    def release(self) -> None:
        """Gives it away once the current stream is done with what it was given."""
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
        # (nbytes,), uint8, ours; the views of a DBuffer share its storage
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        self.held = True
        self._nbytes = nbytes
        self._home = current_stream(device)

    def acquire(self) -> None:
        """Allocates it again; see `Memory.acquire`.

        Raises:
            RuntimeError: somebody holds it.
        """
        if self.held:
            raise RuntimeError("ResizableMemory.acquire: a buffer holds it; release() that first")
        self.bytes.untyped_storage().resize_(self._nbytes)
        self._home = current_stream(self.bytes.device)
        self.held = True

    def release(self) -> None:
        """Returns it to the allocator; see `Memory.release`."""
        if not self.held:
            return
        if self._home is not None:
            self._home.wait_event(current_stream(self.bytes.device).record_event())
        self.bytes.untyped_storage().resize_(0)
        self.held = False


def current_stream(device: torch.device) -> Any:
    """The device's current stream; None where work is done when a call returns."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device).current_stream(device)
