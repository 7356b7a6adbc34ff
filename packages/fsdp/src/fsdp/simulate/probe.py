"""Measures the constants of this machine: real collectives, one model's step, an optimizer's."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from dbuffer import DBuffer, Strategy
from fsdp.api import fully_shard
from fsdp.grouping import Dtypes, plan_buffer
from fsdp.meshes import checked_mesh, device_of, sharded_placements
from fsdp.optimizers import watch_optimizers
from fsdp.simulate.constants import Compute, Constants, Link, Update
from fsdp.simulate.optimizer import KNOWN, Factory
from fsdp.simulate.simulation import simulate
from fsdp.simulate.timed import compute_of
from fsdp.simulate.units import Units, units_of
from fsdp.simulate.work import Forward
from ragged_shard.planner import TensorSpec

__all__ = ["Fit", "Probe", "fit", "probe"]

TENSORS = 8  # that an optimizer is timed on


@dataclass(frozen=True)
class Fit:
    """A straight line through measured times.

    Attributes:
        alpha: seconds at 0.
        beta: seconds for each of what `points` count.
        points: what was measured, and its seconds.
        error: the largest deviation of a point from the line, relative to the point.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...]
    error: float


@dataclass(frozen=True)
class Probe:
    """What was measured; means over ranks.

    Attributes:
        constants: for `simulate`.
        gather: seconds of an all-gather by bytes that a rank sends.
        reduce: of a reduce-scatter, its copies in and out too.
        update: of the optimizer's step, of one tensor by its bytes on a rank.
        step: seconds of a step of the sharded model.
    """

    constants: Constants
    gather: Fit
    reduce: Fit
    update: Fit
    step: float


def probe(
    model: nn.Module,
    forward: Forward,
    *,
    units: Units,
    mesh: DeviceMesh | None = None,
    optimizer: str | Factory = "adamw",
    strategy: Strategy = "auto",
    sizes: Sequence[int] = (2**14, 2**17, 2**20, 2**22, 2**24),
    rounds: int = 7,
    overlap: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Probe:
    """The constants of this machine; every rank has to call, and all work at the same time.

    Args:
        model: not sharded, on the mesh's device; it stays as it is.
        forward: calls the model that it is given on one rank's batch, and returns the loss.
        units: of the model, as of `simulate`: a sharded copy of it is trained, for `slack`.
        mesh: of one axis; by default of all ranks.
        optimizer: whose step is timed, by name, or what makes one of named parameters.
        strategy: of the collectives, as of `fully_shard`.
        sizes: of buffers, in bytes, that collectives and optimizer are timed on.
        rounds: of which medians are taken.
        overlap: what `Constants.overlap` will be. It is not measured.
        clock: of seconds; ``time.process_time`` tells what a rank computes, whoever else does.

    Raises:
        ValueError: a mesh of two axes, fewer than two sizes.
    """
    mesh = checked_mesh(mesh)
    if mesh.ndim != 1 or len(set(sizes)) < 2 or rounds < 1:
        raise ValueError(
            f"probe: mesh of {mesh.ndim} axes, sizes={sizes!r}, rounds={rounds}; wants one axis, "
            f"at least two sizes and one round"
        )
    ranks = mesh.size()
    sent = [size * (ranks - 1) / ranks for size in sizes]
    works = [_collectives(mesh, size, strategy) for size in sizes]
    gather = _over_ranks(
        fit(sent, _medians([work.gather for work in works], mesh, rounds, clock)), mesh
    )
    reduce = _over_ranks(
        fit(sent, _medians([work.reduce for work in works], mesh, rounds, clock)), mesh
    )
    factory = KNOWN[optimizer] if isinstance(optimizer, str) else optimizer
    steps = [_optimizer_step(mesh, size, factory) for size in sizes]
    tensors = [seconds / TENSORS for seconds in _medians(steps, mesh, rounds, clock)]
    update = _over_ranks(fit([size / TENSORS / ranks for size in sizes], tensors), mesh)
    dist.barrier(mesh.get_group())
    timed = compute_of(model, forward, rounds, clock)
    flop, nbyte, op = _mean([timed.flop, timed.nbyte, timed.op], mesh)
    step, *_ = _mean(
        _medians([_training(model, forward, units, mesh, factory, strategy)], mesh, rounds, clock),
        mesh,
    )
    hops = max(ranks - 1, 1)
    constants = Constants(
        Link(gather.alpha / hops, gather.beta), Compute(flop, nbyte, op),
        Update(update.alpha, update.beta), Link(reduce.alpha / hops, reduce.beta), overlap,
    )  # fmt: skip
    told = simulate(
        model, mesh=ranks, units=units, optimizer=factory, forward=forward, constants=constants
    ).time
    assert told is not None
    constants = replace(constants, slack=step / told.total)
    return Probe(constants, gather, reduce, update, step)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """The line ``alpha + beta * size`` with the least relative deviations, neither below 0.

    Args:
        sizes: at least two.
        seconds: of each, above 0.
    """
    weights = [1 / value**2 for value in seconds]
    total = sum(weights)
    x = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    y = sum(w * value for w, value in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    slope = sum(w * (size - x) * (value - y) for w, size, value in points)
    beta = max(0.0, slope / sum(w * (size - x) ** 2 for w, size, _ in points))
    alpha = y - beta * x
    if alpha < 0:  # through 0
        alpha = 0.0
        beta = sum(w * size * value for w, size, value in points) / sum(
            w * size**2 for w, size, _ in points
        )
    error = max(abs(alpha + beta * size - value) / value for _, size, value in points)
    return Fit(alpha, beta, tuple(zip(sizes, seconds, strict=True)), error)


@dataclass(frozen=True)
class _Collectives:
    gather: Callable[[], None]
    reduce: Callable[[], None]


def _collectives(mesh: DeviceMesh, nbytes: int, strategy: Strategy) -> _Collectives:
    """What a group does around its collectives, memory that comes and goes too."""
    device, dtype = device_of(mesh), torch.float32
    numel = nbytes // dtype.itemsize
    layout = plan_buffer((TensorSpec("probe", numel),), mesh.size(), Dtypes(dtype, dtype, dtype))
    placements = sharded_placements(mesh)
    shard = DBuffer(layout, mesh, placements, dtype, device, strategy=strategy)
    full = DBuffer(layout, mesh, placements, dtype, device, full=True, strategy=strategy)
    shard.zero_()
    full.release()
    whole = torch.zeros(numel, device=device)

    def gather() -> None:
        full.acquire()
        full.all_gather_(shard)
        full.release()

    def reduce() -> None:
        full.acquire()
        full.set_placements([Partial("avg")])
        full.copy_from({0: whole})
        full.reduce_scatter_()
        torch.empty_like(full.local).copy_(full.local)
        full.release()

    return _Collectives(gather, reduce)


def _training(
    model: nn.Module, forward: Forward, units: Units, mesh: DeviceMesh, factory: Factory,
    strategy: Strategy,
) -> Callable[[], None]:  # fmt: skip
    """A step of a sharded copy of the model."""
    copied = copy.deepcopy(model)
    for unit in reversed(units_of(copied, units, ())):
        fully_shard(list(unit.modules), mesh=mesh, strategy=strategy)
    optimizer = factory(list(copied.named_parameters()))

    def step() -> None:
        forward(copied).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _optimizer_step(mesh: DeviceMesh, nbytes: int, factory: Factory) -> Callable[[], object]:
    watch_optimizers()
    model = nn.Module()
    for i in range(TENSORS):
        made = torch.zeros(64, max(1, nbytes // TENSORS // 256), device=device_of(mesh))
        model.register_parameter(f"tensor_{i}", nn.Parameter(made))
    fully_shard(model, mesh=mesh)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return factory(list(model.named_parameters())).step


def _medians(
    actions: Sequence[Callable[[], object]],
    mesh: DeviceMesh,
    rounds: int,
    clock: Callable[[], float],
) -> list[float]:
    """Seconds of each, in turns, the first round left out."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds + 1):
        for action, found in zip(actions, times, strict=True):
            dist.barrier(mesh.get_group())
            start = clock()
            action()
            found.append(clock() - start)
    return [statistics.median(found[1:]) for found in times]


def _over_ranks(one: Fit, mesh: DeviceMesh) -> Fit:
    """The fit of the means of all ranks' times."""
    means = _mean([seconds for _, seconds in one.points], mesh)
    return fit([size for size, _ in one.points], means)


def _mean(values: Sequence[float], mesh: DeviceMesh) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device_of(mesh))
    dist.all_reduce(tensor, group=mesh.get_group())
    return [value / mesh.size() for value in tensor.tolist()]
