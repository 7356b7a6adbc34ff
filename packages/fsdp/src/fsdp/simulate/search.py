"""Finds the best number of ranks to shard over; the others replicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fsdp.simulate.machine import Constants, MeshSize
from fsdp.simulate.result import Simulation, simulations_svg, simulations_table
from fsdp.simulate.simulation import Simulator

__all__ = ["Best", "best_group_size", "sweep"]


@dataclass(frozen=True)
class Best:
    """The result of `best_group_size`.

    Attributes:
        group_size: number of ranks that shard.
        simulation: the simulation of this size.
        candidates: simulations of all sizes, in ascending order.
        fits: the sizes whose peak memory is within the limit.
    """

    group_size: int
    simulation: Simulation
    candidates: tuple[Simulation, ...] = field(repr=False)
    fits: tuple[int, ...]

    def table(self) -> str:
        """Returns a line of text for each size."""
        return simulations_table(self.candidates)

    def picture(self, path: str | Path) -> None:
        """Writes an SVG of memory by kind and of the time of a step, for all sizes."""
        Path(path).write_text(simulations_svg(self.candidates))


def sweep(
    model: nn.Module, ranks: int, *, sizes: Iterable[int] | None = None, **options: Any
) -> tuple[Simulation, ...]:
    """Simulates each number of ranks that shard, in ascending order; the others replicate.

    Args:
        model: see `simulate`.
        ranks: number of ranks of the mesh.
        sizes: numbers of ranks that shard; by default all divisors of `ranks`.
        options: options of `simulate` but the mesh.

    Raises:
        ValueError: a size does not divide `ranks`; errors of `simulate`.
    """
    divisors = _divisors(ranks, sizes)
    simulator = Simulator(model, **options)
    return tuple(simulator.run(MeshSize(size, ranks // size)) for size in divisors)


def best_group_size(
    model: nn.Module,
    ranks: int,
    *,
    memory: float,
    constants: Constants,
    sizes: Iterable[int] | None = None,
    **options: Any,
) -> Best:
    """Finds the number of ranks to shard over with the fastest step that fits in memory.

    Args:
        model: see `simulate`.
        ranks: number of ranks of the mesh.
        memory: limit of a rank's memory in bytes.
        constants: constants of the machine.
        sizes: numbers of ranks that shard; by default all divisors of `ranks`.
        options: other options of `simulate`.

    Raises:
        ValueError: no size fits; a size does not divide `ranks`; errors of `simulate`.

    Source: veScale-FSDP, section 6.4, which chooses the size by offline simulation.
    """
    candidates = sweep(model, ranks, sizes=sizes, constants=constants, **options)
    fits = [one for one in candidates if one.memory.peak <= memory]
    if not fits:
        least = min(candidates, key=lambda one: one.memory.peak)
        raise ValueError(
            f"best_group_size: expected memory to be at least {least.memory.peak:,} bytes, which a "
            f"rank needs on {least.mesh}, got {memory:,.0f}; use more ranks, fewer activations, or "
            f"an optimizer with less state"
        )
    best = min(fits, key=_speed)
    return Best(best.mesh.shard, best, candidates, tuple(one.mesh.shard for one in fits))


def _speed(one: Simulation) -> tuple[float, int]:
    assert one.time is not None
    return one.time.total, one.memory.peak


def _divisors(ranks: int, sizes: Iterable[int] | None) -> Sequence[int]:
    """Returns the sizes, or all divisors of `ranks`, in ascending order."""
    if ranks < 1:
        raise ValueError(f"simulate: expected ranks to be at least 1, got {ranks!r}")
    if sizes is None:
        return [size for size in range(1, ranks + 1) if ranks % size == 0]
    chosen = sorted(set(sizes))
    wrong = [size for size in chosen if size < 1 or ranks % size]
    if wrong or not chosen:
        raise ValueError(
            f"simulate: expected sizes to be divisors of {ranks} ranks, got {wrong or chosen}"
        )
    return chosen
