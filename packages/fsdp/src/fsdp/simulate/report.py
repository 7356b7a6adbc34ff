"""A simulation as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp.simulate.simulation import Simulation

__all__ = ["seconds", "size", "sweep_table", "table"]


def table(simulation: Simulation) -> str:
    """One simulation: memory by kind, collectives, time."""
    memory, worst = simulation.memory, simulation.memory.worst
    rows = [
        ("parameters", size(memory.parameters)),
        ("gradients", size(memory.gradients)),
        ("optimizer", size(memory.optimizer)),
        ("buffers", size(memory.buffers)),
        ("between steps", size(memory.resident)),
        ("at the peak: gathered", size(worst.gathered)),
        ("being reduced", size(worst.reducing)),
        ("gradients", size(worst.gradients)),
        ("activations", size(worst.activations)),
        ("peak", size(memory.peak)),
    ]
    for one in simulation.collectives:
        what = f"{one.count} {one.op} of {one.ranks:,} ranks"
        rows.append((what, f"{size(one.nbytes)}, {size(one.sent)} sent"))
    if simulation.time is not None:
        time = simulation.time
        rows += [
            ("compute", seconds(time.compute)),
            ("wait for gathers", seconds(time.gather)),
            ("wait for reductions", seconds(time.reduce)),
            ("optimizer's step", seconds(time.update)),
            ("hooks, and ranks that wait", seconds(time.other)),
            ("step", seconds(time.total)),
        ]
    head = (
        f"{simulation.elements:,} elements in {simulation.groups} groups on {simulation.mesh}, "
        f"padding {100 * simulation.padding_ratio:.3f} %"
    )
    return "\n".join([head, *_aligned(rows)])


def sweep_table(simulations: Sequence[Simulation]) -> str:
    """A line for each: memory per rank by kind, padding, time."""
    head = ("mesh", "padding", "parameters", "gradients", "optimizer", "buffers", "peak", "step")
    rows: list[tuple[str, ...]] = [head]
    for one in simulations:
        memory = one.memory
        kinds = (memory.parameters, memory.gradients, memory.optimizer, memory.buffers, memory.peak)
        step = "" if one.time is None else seconds(one.time.total)
        padding = f"{100 * one.padding_ratio:.3f} %"
        rows.append((str(one.mesh), padding, *(size(kind) for kind in kinds), step))
    return "\n".join(_aligned(rows))


def size(nbytes: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"


def seconds(value: float) -> str:
    """Seconds in words."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
