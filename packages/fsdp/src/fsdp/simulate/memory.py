"""The memory of a rank by kind, between steps and at the peak of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fsdp.simulate.recorder import EventRecorder, MemoryKind

__all__ = ["InStep", "Memory", "in_step", "memory_of"]


@dataclass(frozen=True)
class InStep:
    """Bytes that are allocated and freed in a step.

    Attributes:
        gathered: unsharded parameters with padding, and the shards over fewer ranks that
            ``reshard_after_forward`` as a number saves for backward.
        reducing: buffers of gradients that are being reduced, and what other ranks have sent.
        gradients: reduced gradients, as many as there are at this point.
        activations: all other memory that modules allocate, including unsharded gradients.
    """

    gathered: int = 0
    reducing: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Sum of all kinds, in bytes."""
        return self.gathered + self.reducing + self.gradients + self.activations


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that has most.

    Attributes:
        parameters: what is in memory between steps, with padding: sharded parameters, and the
            unsharded ones or shards that ``placements`` keeps beside them.
        gradients: gradients after backward, sharded unless ``placements`` replicates them.
        optimizer: optimizer state on the rank that has most of it.
        buffers: buffers of modules, which every rank has.
        activations: what forward saves for backward.
        worst: what is allocated in a step, at the point where the total is largest.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    worst: InStep

    @property
    def resident(self) -> int:
        """Bytes between backward and the end of the optimizer's step."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def peak(self) -> int:
        """Maximum of allocated bytes in forward, backward and after them."""
        persistent = self.parameters + self.optimizer + self.buffers
        return max(persistent + self.worst.total, self.resident)


def in_step(allocated: Mapping[MemoryKind, int]) -> InStep:
    """Returns the bytes of kinds that are allocated and freed in a step."""
    return InStep(
        gathered=allocated[MemoryKind.GATHERED],
        reducing=allocated[MemoryKind.REDUCING],
        gradients=allocated[MemoryKind.GRADIENTS],
        activations=allocated[MemoryKind.ACTIVATIONS],
    )


def memory_of(recorder: EventRecorder, optimizer: torch.Tensor, *, activations: int) -> Memory:
    """Returns the memory of the rank that has most.

    Args:
        recorder: has recorded a step, whose gradients are still allocated.
        optimizer: bytes of state on each rank, see `optimizer_bytes`.
        activations: bytes that forward saves for backward.
    """
    return Memory(
        parameters=recorder.allocated(MemoryKind.PARAMETERS),
        gradients=recorder.allocated(MemoryKind.GRADIENTS),
        optimizer=int(optimizer.max()),
        buffers=recorder.allocated(MemoryKind.BUFFERS),
        activations=activations,
        worst=in_step(recorder.worst),
    )
