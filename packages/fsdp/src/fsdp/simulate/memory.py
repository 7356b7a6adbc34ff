"""Bytes on a rank, by kind: between steps, and when a step has most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp.simulate.mesh import MeshSize
from fsdp.simulate.optimizer import Kept, held_by_rank
from fsdp.simulate.schedule import Event, What
from fsdp.simulate.units import Group

__all__ = ["InStep", "Memory", "memory_of", "optimizer_bytes"]


@dataclass(frozen=True)
class InStep:
    """Bytes that come and go in a step.

    Attributes:
        gathered: unsharded parameters, padding too, and what fewer ranks keep for backward.
        reducing: buffers of gradients that are reduced, and what other ranks send for it.
        gradients: sharded ones, as many as there are by then.
        activations: and all else that modules allocate, gradients of unsharded parameters too.
    """

    gathered: int = 0
    reducing: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Bytes."""
        return self.gathered + self.reducing + self.gradients + self.activations


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that has most.

    Attributes:
        parameters: sharded, padding too.
        gradients: sharded, after backward.
        optimizer: state, on the rank that has most of it.
        buffers: of modules; every rank has all.
        activations: that forward has left for backward.
        worst: what comes and goes, at the moment when that is most.
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
        """The most bytes in forward and backward, or after them."""
        kept = self.parameters + self.optimizer + self.buffers
        return max(kept + self.worst.total, self.resident)


def memory_of(
    model: nn.Module,
    groups: Sequence[Group],
    step: Iterable[Event],
    mesh: MeshSize,
    optimizer: torch.Tensor,
    *,
    activations: int,
    exchange: bool,
) -> Memory:
    """Memory of the rank that has most.

    Args:
        model: for its buffers.
        groups: of it.
        step: what happens.
        mesh: sizes.
        optimizer: bytes of each rank, see `optimizer_bytes`.
        activations: that forward has left.
        exchange: whether ranks send each other what they add up, see `dbuffer`'s strategies.
    """
    stored = {id(b.untyped_storage()): b.untyped_storage().nbytes() for b in model.buffers()}
    return Memory(
        parameters=sum(group.shard_bytes(group.dtypes.sharded) for group in groups),
        gradients=sum(group.shard_bytes(group.dtypes.sharded) for group in groups if group.trained),
        optimizer=int(optimizer.max()),
        buffers=sum(stored.values()),
        activations=activations,
        worst=_worst(step, mesh, exchange),
    )


def optimizer_bytes(
    groups: Sequence[Group], kept: Mapping[nn.Parameter, Kept], ranks: int
) -> torch.Tensor:
    """Of each rank that shards: (ranks,), int64."""
    total = torch.zeros(ranks, dtype=torch.float64)
    alike = Counter(  # layers have one layout, and states of the same sizes
        (group.layout, tuple(kept[param] for param in group.params))
        for group in groups
        if group.trained
    )
    for (layout, states), times in alike.items():
        for i, state in enumerate(states):
            held = held_by_rank(layout, i).double()
            total += times * (held * state.per_element + state.per_rank)
    return total.round().long()


def _worst(step: Iterable[Event], mesh: MeshSize, exchange: bool) -> InStep:
    """The moment when most is held."""
    now, worst = InStep(), InStep()
    near: dict[Group, int] = {}  # what fewer ranks keep

    def look(moment: InStep) -> InStep:
        return max(worst, moment, key=lambda one: one.total)

    for event in step:
        if event.what is What.COMPUTE:
            worst = look(replace(now, activations=event.span.peak))
            now = replace(now, activations=event.span.held)
            continue
        group = event.group
        assert group is not None
        full, whole = group.buffer_bytes(group.dtypes.compute), _whole_gradients(group)
        sums = group.buffer_bytes(group.dtypes.reduce)
        received = sums - sums // mesh.shard if exchange else 0
        match event.what:
            case What.GATHER:
                now = replace(now, gathered=now.gathered + full)
            case What.RESHARD:
                if event.near is not None:
                    near[group] = full // event.near
                    now = replace(now, gathered=now.gathered + near[group])
                    worst = look(now)
                now = replace(now, gathered=now.gathered - full)
                if event.near is None:
                    now = replace(now, gathered=now.gathered - near.pop(group, 0))
            case What.TAKE:
                now = replace(now, reducing=now.reducing + sums)
                worst = look(now)
                now = replace(now, activations=now.activations - whole)
            case What.REDUCE:
                now = replace(now, reducing=now.reducing + received)
            case What.REDUCED:
                shard = group.shard_bytes(group.dtypes.sharded)
                now = replace(now, gradients=now.gradients + shard)
                worst = look(now)
                now = replace(now, reducing=now.reducing - sums - received)
        worst = look(now)
    return worst


def _whole_gradients(group: Group) -> int:
    return group.layout.total * group.dtypes.compute.itemsize
