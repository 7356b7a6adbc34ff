"""Counts the compute, memory and traffic of a training step, on rank 0 of a fake world.

The packages run their own code on fake tensors, and `fsdp.simulate.recorder` records it. Layers of
a kind are identical, so that models are run with one and with two of each kind, and the difference
is taken as the work of every further layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.simulate.events import CommEvent, ComputeWork
from fsdp.simulate.memory import InStep, in_step
from fsdp.simulate.recorder import EventRecorder, MemoryKind
from integration.scale.shapes import Depth, Shape
from integration.scale.strategies import NODE, ParallelStrategy, WorldAxis, axes_of, distribute
from testkit import Collective, fake_mesh
from testkit.comm_log import Op

__all__ = [
    "SEQUENCE", "AxisTraffic", "CountedStep", "StepWork", "count", "count_at", "sent_collective",
    "step_work",
]  # fmt: skip

SEQUENCE = 4096
"""Tokens of a sequence."""


@dataclass(frozen=True)
class AxisTraffic:
    """The collectives of one kind along one axis.

    Attributes:
        op: kind of collective.
        axis: axis of the mesh, or several joined by "+".
        calls: number of collectives.
        nbytes: bytes that this rank sends, as `testkit.Collective.wire_bytes`.
    """

    op: Op
    axis: WorldAxis
    calls: int
    nbytes: int


@dataclass(frozen=True)
class StepWork:
    """The work of a rank for a part of a model in a step, forward and backward.

    Attributes:
        flops: FLOPs of matrix products and attention.
        operators: number of operators on local tensors.
        parameters: bytes of the rank's parameters between steps.
        traffic: collectives by kind and axis.
        peak: bytes that are allocated in the step, where their sum is largest; None for sums, as
            it is not proportional to the number of layers.
        nbytes: bytes that operators other than matrix products read and write.
    """

    flops: int = 0
    operators: int = 0
    parameters: int = 0
    traffic: tuple[AxisTraffic, ...] = ()
    peak: InStep | None = None
    nbytes: int = 0

    def plus(self, other: StepWork, times: int = 1) -> StepWork:
        """Returns the sum of this work and ``times`` the other; ``times`` may be negative."""
        found = {(one.op, one.axis): one for one in self.traffic}
        for one in other.traffic:
            before = found.get((one.op, one.axis), replace(one, calls=0, nbytes=0))
            calls, nbytes = before.calls + times * one.calls, before.nbytes + times * one.nbytes
            found[one.op, one.axis] = replace(one, calls=calls, nbytes=nbytes)
        return StepWork(
            self.flops + times * other.flops, self.operators + times * other.operators,
            self.parameters + times * other.parameters,
            tuple(one for one in found.values() if one.calls or one.nbytes),
            nbytes=self.nbytes + times * other.nbytes,
        )  # fmt: skip

    def divided(self, number: int) -> StepWork:
        """Returns the work divided by a number, rounded."""
        return StepWork(
            round(self.flops / number), round(self.operators / number),
            round(self.parameters / number),
            tuple(
                replace(
                    one, calls=round(one.calls / number), nbytes=round(one.nbytes / number)
                )
                for one in self.traffic
            ),
            nbytes=round(self.nbytes / number),
        )  # fmt: skip


@dataclass(frozen=True)
class CountedStep:
    """The work of one rank in a step of one sequence per data parallel rank.

    Attributes:
        model: name of the model.
        strategy: name of the strategy.
        ranks: size of the world.
        tokens: tokens of a data parallel rank in a step.
        axes: axes of the mesh.
        root: work outside of all layers.
        layers: work of one layer of each kind.
        times: number of layers of each kind.
    """

    model: str
    strategy: str
    ranks: int
    tokens: int
    axes: tuple[WorldAxis, ...]
    root: StepWork
    layers: tuple[StepWork, ...]
    times: tuple[int, ...]

    @property
    def whole(self) -> StepWork:
        """Work of the whole model."""
        made = self.root
        for layer, times in zip(self.layers, self.times, strict=True):
            made = made.plus(layer, times)
        return made

    @property
    def sharing(self) -> int:
        """Number of ranks with the same data."""
        return next((axis.size for axis in self.axes if axis.name == "tp"), 1)


def count(
    shape: Shape, strategy: ParallelStrategy, ranks: int, *, depth: Depth | None = None,
    width: float = 1.0, node: int = NODE, sequence: int = SEQUENCE,
) -> CountedStep:  # fmt: skip
    """Counts a step of a model under a strategy.

    Args:
        shape: the model.
        strategy: how it is parallelized.
        ranks: size of the world.
        depth: number of layers, by default the published model's.
        width: see `Shape.values`.
        node: ranks per node.
        sequence: tokens of a sequence, of which each data parallel rank has one.

    Raises:
        UsageError: the size of the world is not divisible by the strategy's groups.
    """
    depth = depth or shape.depth
    axes = axes_of(strategy, ranks, node)
    one = Depth(min(1, depth.dense), min(1, depth.experts))

    def at(here: Depth) -> StepWork:
        return count_at(shape, strategy, ranks, here, width=width, node=node, sequence=sequence)

    first = at(one)
    more = [
        (times, at(replace(one, **{kind: 2})).plus(first, -1))
        for kind, times in (("dense", depth.dense), ("experts", depth.experts))
        if times
    ]
    root = first
    for _, layer in more:
        root = root.plus(layer, -1)
    return CountedStep(
        shape.name, strategy.name, ranks, sequence, axes, root, tuple(layer for _, layer in more),
        tuple(times for times, _ in more),
    )  # fmt: skip


def count_at(
    shape: Shape, strategy: ParallelStrategy, ranks: int, depth: Depth, *, width: float = 1.0,
    node: int = NODE, sequence: int = SEQUENCE,
) -> StepWork:  # fmt: skip
    """Counts a step of a model with exactly ``depth`` layers; see `count`."""
    axes = axes_of(strategy, ranks, node)
    with fake_mesh([axis.size for axis in axes], [axis.name for axis in axes]) as mesh:
        model = distribute(shape.build(depth, width), shape, strategy, mesh)
        with EventRecorder() as recorder:
            model.to_empty(device="cpu")
            recorder.watch(model)
            data = ranks // next((axis.size for axis in axes if axis.name == "tp"), 1)
            # A plan takes the global batch and shards it; fully_shard takes a rank's batch.
            tokens = torch.zeros(data if strategy.tensor else 1, sequence, dtype=torch.long)
            _step(model, tokens)  # the first step also compares plans across ranks
            model.zero_grad()
            recorder.start_step()
            _step(model, tokens)
            recorder.finish_step()
        return step_work(recorder, axes, mesh)


def sent_collective(event: CommEvent) -> Collective:
    """Returns a recorded collective as `testkit.CommLog` would record it."""
    splits = (event.input_bytes // event.ranks,) * event.ranks if event.op == "all_to_all" else ()
    return Collective(
        cast(Op, event.op), event.input_bytes, event.output_bytes, event.dtype, event.group,
        event.ranks, event.rank, input_splits=splits, output_splits=splits,
    )  # fmt: skip


def step_work(recorder: EventRecorder, axes: Sequence[WorldAxis], mesh: DeviceMesh) -> StepWork:
    """Returns the work that was recorded.

    Args:
        recorder: has recorded a step.
        axes: axes of the mesh, with their names there.
        mesh: of the world, along whose axes collectives are.

    Raises:
        RuntimeError: a collective is neither along one axis nor along all.
    """
    of_group = {str(mesh.get_group(axis.name).group_name): axis for axis in axes}
    calls: defaultdict[tuple[Op, WorldAxis], list[int]] = defaultdict(list)
    for event in recorder.events:
        if isinstance(event, CommEvent):
            one = sent_collective(event)
            assert one.wire_bytes is not None
            calls[one.op, _axis(one, of_group, mesh.size())].append(one.wire_bytes)
    compute = sum(
        (event for event in recorder.events if isinstance(event, ComputeWork)), ComputeWork()
    )
    traffic = tuple(AxisTraffic(*key, len(sizes), sum(sizes)) for key, sizes in calls.items())
    parameters = recorder.allocated(MemoryKind.PARAMETERS)
    return StepWork(
        compute.flops, compute.ops, parameters, traffic, in_step(recorder.worst), compute.nbytes
    )


def _step(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def _axis(one: Collective, of_group: Mapping[str, WorldAxis], ranks: int) -> WorldAxis:
    """Returns the axis of a collective; a collective of the whole world is of all axes joined."""
    if one.group is not None and one.group in of_group:
        return of_group[one.group]
    if one.group_size != ranks:
        raise RuntimeError(
            f"expected a collective along one axis of {list(of_group.values())}, or along all,"
            f" got {one}; count a strategy of `strategies`"
        )
    return WorldAxis("+".join(axis.name for axis in of_group.values()), ranks, 1)
