"""The best number of ranks to shard over: all others replicate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fsdp.simulate.constants import Constants
from fsdp.simulate.mesh import MeshSize
from fsdp.simulate.simulation import Job, Simulation

__all__ = ["Best", "best_group_size", "sweep"]


@dataclass(frozen=True)
class Best:
    """What `best_group_size` found.

    Attributes:
        group_size: ranks that shard.
        simulation: of that size.
        candidates: simulations of all sizes, ascending.
        fits: the sizes whose peak is within the limit.
    """

    group_size: int
    simulation: Simulation
    candidates: tuple[Simulation, ...] = field(repr=False)
    fits: tuple[int, ...]

    def table(self) -> str:
        """A line for each size."""
        from fsdp.simulate.report import sweep_table

        return sweep_table(self.candidates)

    def picture(self, path: str | Path) -> None:
        """Writes an SVG of memory by kind and of the step's time, over sizes."""
        from fsdp.simulate.picture import draw

        Path(path).write_text(draw(self.candidates))


def sweep(
    model: nn.Module, ranks: int, *, sizes: Iterable[int] | None = None, **options: Any
) -> tuple[Simulation, ...]:
    """A simulation for each number of ranks that shard, ascending; the others replicate.

    Args:
        model: see `simulate`.
        ranks: of the mesh.
        sizes: of groups; by default all divisors of `ranks`.
        options: of `simulate`, all but the mesh.

    Raises:
        ValueError: a size that does not divide `ranks`; as of `simulate`.
    """
    checked = _sizes(ranks, sizes)
    job = Job(model, **options)
    return tuple(job.on(MeshSize(size, ranks // size)) for size in checked)


def best_group_size(
    model: nn.Module,
    ranks: int,
    *,
    memory: float,
    constants: Constants,
    sizes: Iterable[int] | None = None,
    **options: Any,
) -> Best:
    """The number of ranks to shard over whose step is fastest among those that fit.

    Args:
        model: see `simulate`.
        ranks: of the mesh.
        memory: bytes of a rank that parameters, states, activations and buffers may take.
        constants: of the machine.
        sizes: of groups; by default all divisors of `ranks`.
        options: of `simulate`, all others.

    Raises:
        ValueError: nothing fits; a size that does not divide `ranks`; as of `simulate`.

    Source: veScale-FSDP, section 6.4, which chooses it by offline simulation.
    """
    found = sweep(model, ranks, sizes=sizes, constants=constants, **options)
    fits = [one for one in found if one.memory.peak <= memory]
    if not fits:
        least = min(found, key=lambda one: one.memory.peak)
        raise ValueError(
            f"best_group_size: memory={memory:,.0f} bytes; the least that a rank takes is "
            f"{least.memory.peak:,}, on {least.mesh}: wants more memory or ranks, fewer "
            f"activations, or a smaller optimizer state"
        )
    best = min(fits, key=_speed)
    return Best(best.mesh.shard, best, found, tuple(one.mesh.shard for one in fits))


def _speed(one: Simulation) -> tuple[float, int]:
    assert one.time is not None
    return one.time.total, one.memory.peak


def _sizes(ranks: int, sizes: Iterable[int] | None) -> Sequence[int]:
    if ranks < 1:
        raise ValueError(f"simulate: ranks={ranks!r}; wants at least 1")
    if sizes is None:
        return [size for size in range(1, ranks + 1) if ranks % size == 0]
    given = sorted(set(sizes))
    wrong = [size for size in given if size < 1 or ranks % size]
    if wrong or not given:
        raise ValueError(f"simulate: sizes={wrong or given}; wants divisors of {ranks} ranks")
    return given
