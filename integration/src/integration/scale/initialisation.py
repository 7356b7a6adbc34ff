"""How long a rank takes to begin, and with how much memory: each in a process of its own."""

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
    """What rank 0 takes until its first step; nothing is sent, so nobody is waited for.

    Attributes:
        model: its name.
        way: its name.
        ranks: of the world.
        mesh: seconds, process groups included.
        model_on_meta: seconds.
        distribute: seconds of the plan and of fully_shard.
        memory: bytes of the process that all of that takes at its peak.
    """

    model: str
    way: str
    ranks: int
    mesh: float
    model_on_meta: float
    distribute: float
    memory: int


def measure(model: str, way: str, ranks: int, depth: Depth | None = None) -> Initialisation:
    """Measures in a new process, which has imported everything before.

    Args:
        model: name of a shape.
        way: name of a way of it.
        ranks: of the world.
        depth: layers, by default all.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["integration.scale.preload"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        return pool.apply(initialise, (model, way, ranks, depth))


def initialise(model: str, way: str, ranks: int, depth: Depth | None) -> Initialisation:
    """Measures in this process; for the arguments see `measure`."""
    shape, chosen = shape_named(model), strategy_named(way)
    axes = axes_of(chosen, ranks, NODE)
    before = _peak()
    moments = [time.perf_counter()]
    with fake_mesh([axis.size for axis in axes], [axis.name for axis in axes]) as mesh:
        moments.append(time.perf_counter())
        built = shape.build(depth or shape.depth)
        moments.append(time.perf_counter())
        distribute(built, shape, chosen, mesh)
        moments.append(time.perf_counter())
        memory = _peak() - before
    on_mesh, on_meta, distributed = (after - earlier for earlier, after in pairwise(moments))
    return Initialisation(model, way, ranks, on_mesh, on_meta, distributed, memory)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
