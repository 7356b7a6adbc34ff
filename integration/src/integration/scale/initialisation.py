"""Measures time and memory of a rank's initialisation, in separate processes."""

from __future__ import annotations

import multiprocessing
import resource
import time
from dataclasses import dataclass
from itertools import pairwise

from integration.scale.shapes import Depth, shape_named
from integration.scale.strategies import NODE, axes_of, distribute, strategy_named
from testkit import fake_mesh

__all__ = ["Initialisation", "initialise", "measure"]


@dataclass(frozen=True)
class Initialisation:
    """Time and memory of rank 0 until its first step; nothing is sent.

    Attributes:
        model: name of the model.
        strategy: name of the strategy.
        ranks: size of the world.
        mesh: seconds to construct the mesh and its process groups.
        model_on_meta: seconds to construct the model on the meta device.
        distribute: seconds of the plan and of fully_shard.
        memory: growth of the process's peak memory, in bytes.
    """

    model: str
    strategy: str
    ranks: int
    mesh: float
    model_on_meta: float
    distribute: float
    memory: int


def measure(model: str, strategy: str, ranks: int, depth: Depth | None = None) -> Initialisation:
    """Measures in a new process, which has imported everything.

    Args:
        model: name of the model.
        strategy: name of the strategy.
        ranks: size of the world.
        depth: number of layers, by default the published model's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["integration.scale.preload"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(initialise, (model, strategy, ranks, depth))


def initialise(model: str, strategy: str, ranks: int, depth: Depth | None) -> Initialisation:
    """Measures in this process; see `measure`."""
    shape, chosen = shape_named(model), strategy_named(strategy)
    axes = axes_of(chosen, ranks, NODE)
    before = _peak()
    times = [time.perf_counter()]
    with fake_mesh([axis.size for axis in axes], [axis.name for axis in axes]) as mesh:
        times.append(time.perf_counter())
        built = shape.build(depth or shape.depth)
        times.append(time.perf_counter())
        distribute(built, shape, chosen, mesh)
        times.append(time.perf_counter())
        memory = _peak() - before
    on_mesh, on_meta, distributed = (after - earlier for earlier, after in pairwise(times))
    return Initialisation(model, strategy, ranks, on_mesh, on_meta, distributed, memory)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
