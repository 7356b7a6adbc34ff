"""The result of a simulation, as numbers, tables and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdp.simulate.cost import Collective, StepTime
from fsdp.simulate.machine import MeshSize
from fsdp.simulate.memory import InStep, Memory
from fsdp.simulate.report import BarChart, align_columns, format_bytes, format_seconds, to_svg

__all__ = ["Simulation", "simulations_svg", "simulations_table"]


@dataclass(frozen=True)
class Simulation:
    """What training a model takes on a mesh.

    Attributes:
        mesh: sizes of the mesh axes.
        groups: number of parameter groups, each with one buffer.
        elements: elements of all parameters.
        padding: elements of the buffers that belong to no parameter.
        memory: memory of the rank that has most.
        optimizer_by_rank: bytes of optimizer state on each rank of one replica; with
            ``placements="hfsdp"`` on all ranks, with the replicas of a shard side by side.
        collectives: collectives of a step.
        time: time of a step; None without constants.
    """

    mesh: MeshSize
    groups: int
    elements: int
    padding: int
    memory: Memory
    optimizer_by_rank: tuple[int, ...] = field(repr=False)
    collectives: tuple[Collective, ...]
    time: StepTime | None

    @property
    def padding_ratio(self) -> float:
        """Padding over the elements of all parameters."""
        return self.padding / self.elements if self.elements else 0.0

    def table(self) -> str:
        """Returns memory by kind, collectives and time as text."""
        rows = _memory_rows(self.memory)
        for one in self.collectives:
            name = f"{one.count} {one.op} of {one.ranks:,} ranks"
            rows.append((name, f"{format_bytes(one.nbytes)}, {format_bytes(one.sent)} sent"))
        if self.time is not None:
            rows += _time_rows(self.time)
        head = (
            f"{self.elements:,} elements in {self.groups} groups on {self.mesh}, "
            f"padding {100 * self.padding_ratio:.3f} %"
        )
        return f"{head}\n{align_columns(rows)}"

    def picture(self, path: str | Path) -> None:
        """Writes an SVG of memory by kind, and of the time of a step if it is known."""
        Path(path).write_text(simulations_svg([self]))


def simulations_table(simulations: Sequence[Simulation]) -> str:
    """Returns a line of text for each simulation: padding, memory of a rank by kind, and time."""
    head = ("mesh", "padding", "parameters", "gradients", "optimizer", "buffers", "peak", "step")
    rows: list[tuple[str, ...]] = [head]
    for one in simulations:
        memory = one.memory
        kinds = (memory.parameters, memory.gradients, memory.optimizer, memory.buffers, memory.peak)
        step = "" if one.time is None else format_seconds(one.time.total)
        padding = f"{100 * one.padding_ratio:.3f} %"
        rows.append((str(one.mesh), padding, *(format_bytes(kind) for kind in kinds), step))
    return align_columns(rows)


def simulations_svg(simulations: Sequence[Simulation]) -> str:
    """Returns an SVG with a bar for each simulation: memory at the peak, and time if known."""
    memory = {str(one.mesh): _memory_bar(one.memory) for one in simulations}
    charts = [BarChart("memory of a rank at the peak of a step", memory, format_bytes)]
    times = {str(one.mesh): _time_bar(one.time) for one in simulations if one.time is not None}
    if all(one.time is not None for one in simulations):
        charts.append(BarChart("time of a step", times, format_seconds))
    return to_svg(charts)


def _memory_rows(memory: Memory) -> list[tuple[str, ...]]:
    worst = memory.worst
    return [
        ("parameters", format_bytes(memory.parameters)),
        ("gradients", format_bytes(memory.gradients)),
        ("optimizer", format_bytes(memory.optimizer)),
        ("buffers", format_bytes(memory.buffers)),
        ("between steps", format_bytes(memory.resident)),
        ("at the peak: gathered", format_bytes(worst.gathered)),
        ("being reduced", format_bytes(worst.reducing)),
        ("gradients", format_bytes(worst.gradients)),
        ("activations", format_bytes(worst.activations)),
        ("peak", format_bytes(memory.peak)),
    ]


def _time_rows(time: StepTime) -> list[tuple[str, ...]]:
    return [
        ("compute", format_seconds(time.compute)),
        ("wait for gathers", format_seconds(time.gather)),
        ("wait for reductions", format_seconds(time.reduce)),
        ("optimizer's step", format_seconds(time.update)),
        ("hooks, and ranks that wait", format_seconds(time.other)),
        ("step", format_seconds(time.total)),
    ]


def _memory_bar(memory: Memory) -> dict[str, float]:
    worst = memory.worst
    if memory.peak == memory.resident:  # more than at any point of forward and backward
        worst = InStep(gradients=memory.gradients)
    return {
        "parameters": memory.parameters, "gradients": worst.gradients,
        "optimizer": memory.optimizer, "buffers": memory.buffers, "gathered": worst.gathered,
        "being reduced": worst.reducing, "activations": worst.activations,
    }  # fmt: skip


def _time_bar(time: StepTime) -> dict[str, float]:
    return {
        "compute": time.compute, "wait for gathers": time.gather,
        "wait for reductions": time.reduce, "optimizer": time.update,
        "other": time.other,
    }  # fmt: skip
