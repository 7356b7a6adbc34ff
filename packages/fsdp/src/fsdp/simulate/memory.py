"""The memory of a rank by kind, between steps and at the peak of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp.simulate.machine import MeshSize
from fsdp.simulate.schedule import EventKind, ScheduledEvent
from fsdp.simulate.units import PlannedGroup

__all__ = ["InStep", "Memory", "memory_of"]


@dataclass(frozen=True)
class InStep:
    """Bytes that are allocated and freed in a step.

    Attributes:
        gathered: unsharded parameters with padding, and the shards over fewer ranks that
            ``reshard_after_forward`` as a number saves for backward.
        reducing: buffers of gradients that are being reduced, and what other ranks have sent.
        gradients: sharded gradients, as many as there are at this point.
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
        parameters: sharded parameters, with padding.
        gradients: sharded gradients after backward.
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


def memory_of(
    model: nn.Module,
    groups: Sequence[PlannedGroup],
    step: Iterable[ScheduledEvent],
    mesh: MeshSize,
    optimizer: torch.Tensor,
    *,
    activations: int,
    exchange: bool,
) -> Memory:
    """Returns the memory of the rank that has most.

    Args:
        model: its buffers are counted.
        groups: parameter groups of the model.
        step: events of a step.
        mesh: sizes of the mesh.
        optimizer: bytes of state on each rank, see `optimizer_bytes`.
        activations: bytes that forward saves for backward.
        exchange: whether reductions receive the other ranks' shards, see the strategies of dbuffer.
    """
    stored = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()}
    return Memory(
        parameters=sum(group.shard_bytes(group.dtypes.sharded) for group in groups),
        gradients=sum(group.shard_bytes(group.dtypes.sharded) for group in groups if group.trained),
        optimizer=int(optimizer.max()),
        buffers=sum(stored.values()),
        activations=activations,
        worst=_peak_of_step(step, mesh, exchange=exchange),
    )


def _peak_of_step(step: Iterable[ScheduledEvent], mesh: MeshSize, *, exchange: bool) -> InStep:
    """Replays a step and returns its memory at the point where the total is largest."""
    now, worst = InStep(), InStep()
    subgroup_shards: dict[PlannedGroup, int] = {}  # saved by groups that fewer ranks shard

    def worse(candidate: InStep) -> InStep:
        return max(worst, candidate, key=lambda one: one.total)

    for event in step:
        if event.kind is EventKind.COMPUTE:
            worst = worse(replace(now, activations=event.segment.peak))
            now = replace(now, activations=event.segment.allocated)
            continue
        group = event.group
        assert group is not None
        unsharded = group.buffer_bytes(group.dtypes.compute)
        reduced = group.buffer_bytes(group.dtypes.reduce)
        received = reduced - reduced // mesh.shard if exchange else 0
        match event.kind:
            case EventKind.ALL_GATHER:
                now = replace(now, gathered=now.gathered + unsharded)
            case EventKind.RESHARD:
                if event.subgroup_size is not None:
                    subgroup_shards[group] = unsharded // event.subgroup_size
                    now = replace(now, gathered=now.gathered + subgroup_shards[group])
                    worst = worse(now)
                now = replace(now, gathered=now.gathered - unsharded)
                if event.subgroup_size is None:
                    freed = subgroup_shards.pop(group, 0)
                    now = replace(now, gathered=now.gathered - freed)
            case EventKind.COPY_IN:
                now = replace(now, reducing=now.reducing + reduced)
                worst = worse(now)
                now = replace(now, activations=now.activations - _unsharded_grad_bytes(group))
            case EventKind.REDUCE_SCATTER:
                now = replace(now, reducing=now.reducing + received)
            case EventKind.REDUCE_SCATTER_WAIT:
                shard = group.shard_bytes(group.dtypes.sharded)
                now = replace(now, gradients=now.gradients + shard)
                worst = worse(now)
                now = replace(now, reducing=now.reducing - reduced - received)
        worst = worse(now)
    return worst


def _unsharded_grad_bytes(group: PlannedGroup) -> int:
    return group.layout.total * group.dtypes.compute.itemsize
