"""Measures the constants of this machine: collectives, computation, and the optimizer's step."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.utils._python_dispatch import TorchDispatchMode

from dbuffer import DBuffer, Strategy
from fsdp.api import fully_shard, watch_optimizers
from fsdp.collectives.group_layout import Dtypes, plan_buffer
from fsdp.mesh import checked_mesh, device_of, sharded_placements
from fsdp.simulate.events import ComputeWork, operator_work
from fsdp.simulate.machine import Compute, Constants, Link, Update
from fsdp.simulate.optimizer_state import OPTIMIZERS, OptimizerFactory
from fsdp.simulate.simulated_model import Forward
from fsdp.simulate.simulation import simulate
from fsdp.simulate.units import Units, find_units
from ragged_shard.planner import TensorSpec

__all__ = ["ComputeTimes", "Fit", "Probe", "fit", "measure_compute", "probe"]

Clock: TypeAlias = Callable[[], float]

_OPTIMIZER_TENSORS = 8  # number of parameters of the optimizer that is timed


@dataclass(frozen=True)
class Fit:
    """A straight line fitted to measured times.

    Attributes:
        alpha: seconds at size 0.
        beta: seconds per unit of size.
        points: the measured sizes and seconds.
        error: the largest deviation of a point from the line, relative to the point.
    """

    alpha: float
    beta: float
    points: tuple[tuple[float, float], ...]
    error: float


@dataclass(frozen=True)
class Probe:
    """Measured times, as means over ranks.

    Attributes:
        constants: constants for `simulate`.
        gather: seconds of an all-gather by the bytes that a rank sends.
        reduce: seconds of a reduce-scatter, including copies in and out, by the same bytes.
        update: seconds of the optimizer's step per tensor, by its bytes on a rank.
        step: seconds of a step of the sharded model.
    """

    constants: Constants
    gather: Fit
    reduce: Fit
    update: Fit
    step: float


@dataclass(frozen=True)
class ComputeTimes:
    """Measured times of forward and backward of a model.

    Attributes:
        flop: seconds per flop.
        nbyte: seconds per byte of operators without flops.
        op: seconds per operator call, for the time that is neither of these.
        step: seconds of forward and backward.
    """

    flop: float
    nbyte: float
    op: float
    step: float


def probe(
    model: nn.Module,
    forward: Forward,
    *,
    units: Units,
    mesh: DeviceMesh | None = None,
    optimizer: str | OptimizerFactory = "adamw",
    strategy: Strategy = "auto",
    sizes: Sequence[int] = (2**14, 2**17, 2**20, 2**22, 2**24),
    rounds: int = 7,
    overlap: bool = False,
    clock: Clock = time.perf_counter,
) -> Probe:
    """Measures the constants of this machine; all ranks must call it at the same time.

    Args:
        model: not sharded, on the mesh's device; it is not changed.
        forward: calls the model that it gets on one rank's batch, and returns the loss.
        units: units of the model, as for `simulate`; a sharded copy is trained to measure `slack`.
        mesh: has one axis; by default all ranks.
        optimizer: the optimizer to time: its name, or a function that returns an optimizer of named
            parameters.
        strategy: strategy of the collectives, as for `fully_shard`.
        sizes: bytes of the buffers on which collectives and optimizer are timed.
        rounds: number of measurements, of which medians are taken.
        overlap: value of `Constants.overlap`; it is not measured.
        clock: returns seconds. ``time.process_time`` measures the processor time of a rank, which
            other processes on the machine affect less.

    Raises:
        ValueError: the mesh has two axes, or there are fewer than two sizes or no rounds.
    """
    mesh = checked_mesh(mesh)
    if mesh.ndim != 1 or len(set(sizes)) < 2 or rounds < 1:
        raise ValueError(
            f"probe: expected a mesh of one axis, at least two sizes and one round, got a mesh of "
            f"{mesh.ndim} axes, sizes={sizes!r}, rounds={rounds}"
        )
    ranks = mesh.size()
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    timer = _Timer(mesh, rounds, clock)
    sent = [size * (ranks - 1) / ranks for size in sizes]
    collectives = [_collectives(mesh, size, strategy) for size in sizes]
    gather = timer.fit(sent, timer.medians([one.gather for one in collectives]))
    reduce = timer.fit(sent, timer.medians([one.reduce for one in collectives]))
    steps = timer.medians([_optimizer_step(mesh, size, factory) for size in sizes])
    update = timer.fit(
        [size / _OPTIMIZER_TENSORS / ranks for size in sizes],
        [seconds / _OPTIMIZER_TENSORS for seconds in steps],
    )
    dist.barrier(mesh.get_group())
    compute = measure_compute(model, forward, rounds, clock)
    flop, nbyte, op = timer.mean([compute.flop, compute.nbyte, compute.op])
    training = _training_step(model, forward, units, mesh, factory, strategy)
    step, *_ = timer.mean(timer.medians([training]))
    hops = max(ranks - 1, 1)
    constants = Constants(
        Link(gather.alpha / hops, gather.beta), Compute(flop, nbyte, op),
        Update(update.alpha, update.beta), Link(reduce.alpha / hops, reduce.beta), overlap=overlap,
    )  # fmt: skip
    predicted = simulate(
        model, mesh=ranks, units=units, optimizer=factory, forward=forward, constants=constants
    ).time
    assert predicted is not None
    constants = replace(constants, slack=step / predicted.total)
    return Probe(constants, gather, reduce, update, step)


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fits ``alpha + beta * size`` by least squares of relative deviations, neither below 0.

    Args:
        sizes: at least two.
        seconds: the time of each size, above 0.
    """
    weights = [1 / value**2 for value in seconds]
    total = sum(weights)
    x = sum(w * size for w, size in zip(weights, sizes, strict=True)) / total
    y = sum(w * value for w, value in zip(weights, seconds, strict=True)) / total
    points = list(zip(weights, sizes, seconds, strict=True))
    slope = sum(w * (size - x) * (value - y) for w, size, value in points)
    beta = max(0.0, slope / sum(w * (size - x) ** 2 for w, size, _ in points))
    alpha = y - beta * x
    if alpha < 0:  # the best line through the origin
        alpha = 0.0
        beta = sum(w * size * value for w, size, value in points) / sum(
            w * size**2 for w, size, _ in points
        )
    error = max(abs(alpha + beta * size - value) / value for _, size, value in points)
    return Fit(alpha, beta, tuple(zip(sizes, seconds, strict=True)), error)


def measure_compute(model: nn.Module, forward: Forward, rounds: int, clock: Clock) -> ComputeTimes:
    """Times forward and backward as a whole, and once each of their operators.

    The time of operators with flops is divided by their flops, that of the others by their bytes,
    and the rest of the step by the number of operator calls.

    Args:
        model: not sharded; its gradients are restored.
        forward: calls the model and returns the loss.
        rounds: number of measurements of the whole, of which the median is taken.
        clock: returns seconds.
    """
    grads = [param.grad for param in model.parameters()]
    times = [_step_seconds(model, forward, clock) for _ in range(rounds + 1)][1:]
    recorder = _OperatorTimer(clock)
    with recorder:
        forward(model).backward()
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad
    return recorder.times(statistics.median(times))


def _step_seconds(model: nn.Module, forward: Forward, clock: Clock) -> float:
    start = clock()
    forward(model).backward()
    seconds = clock() - start
    for param in model.parameters():
        param.grad = None
    return seconds


class _OperatorTimer(TorchDispatchMode):
    """Times operators."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._total, self._flop_seconds, self._byte_seconds = ComputeWork(), 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and times it."""
        kwargs, start = kwargs or {}, self._clock()
        out = func(*args, **kwargs)
        seconds = self._clock() - start
        work = operator_work(func, args, kwargs, out)
        self._total += work
        if work.flops:
            self._flop_seconds += seconds
        elif work.nbytes:
            self._byte_seconds += seconds
        return out

    def times(self, step: float) -> ComputeTimes:
        """Returns the times, scaled down if the operators took longer than the step."""
        operators = self._flop_seconds + self._byte_seconds
        scale = min(1.0, step / operators)
        flop = scale * self._flop_seconds / max(self._total.flops, 1)
        nbyte = scale * self._byte_seconds / max(self._total.nbytes, 1)
        op = max(0.0, step - operators) / max(self._total.ops, 1)
        return ComputeTimes(flop, nbyte, op, step)


@dataclass(frozen=True)
class _Timer:
    """Times functions on all ranks of a mesh.

    Attributes:
        mesh: has one axis.
        rounds: number of measurements.
        clock: returns seconds.
    """

    mesh: DeviceMesh
    rounds: int
    clock: Clock

    def medians(self, functions: Sequence[Callable[[], object]]) -> list[float]:
        """Returns the seconds of each function; they take turns, and the first round is dropped."""
        times: list[list[float]] = [[] for _ in functions]
        for _ in range(self.rounds + 1):
            for function, measured in zip(functions, times, strict=True):
                dist.barrier(self.mesh.get_group())
                start = self.clock()
                function()
                measured.append(self.clock() - start)
        return [statistics.median(measured[1:]) for measured in times]

    def mean(self, values: Sequence[float]) -> list[float]:
        """Returns the means of values over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=device_of(self.mesh))
        dist.all_reduce(tensor, group=self.mesh.get_group())
        return [value / self.mesh.size() for value in tensor.tolist()]

    def fit(self, sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
        """Fits the means of seconds over ranks."""
        return fit(sizes, self.mean(seconds))


@dataclass(frozen=True)
class _Collectives:
    gather: Callable[[], None]
    reduce: Callable[[], None]


def _collectives(mesh: DeviceMesh, nbytes: int, strategy: Strategy) -> _Collectives:
    """Returns the collectives of a parameter group, including allocations and copies."""
    device, dtype = device_of(mesh), torch.float32
    numel = nbytes // dtype.itemsize
    layout = plan_buffer((TensorSpec("probe", numel),), mesh.size(), Dtypes(dtype, dtype, dtype))
    placements = sharded_placements(mesh)
    shard = DBuffer(layout, mesh, placements, dtype, device, strategy=strategy)
    full = DBuffer(layout, mesh, placements, dtype, device, full=True, strategy=strategy)
    shard.zero_()
    full.release()
    grad = torch.zeros(numel, device=device)

    def gather() -> None:
        full.acquire()
        full.all_gather_(shard)
        full.release()

    def reduce() -> None:
        full.acquire()
        full.set_placements([Partial("avg")])
        full.copy_from({0: grad})
        full.reduce_scatter_()
        torch.empty_like(full.local).copy_(full.local)
        full.release()

    return _Collectives(gather, reduce)


def _training_step(
    model: nn.Module, forward: Forward, units: Units, mesh: DeviceMesh, factory: OptimizerFactory,
    strategy: Strategy,
) -> Callable[[], None]:  # fmt: skip
    """Returns a training step of a sharded copy of the model."""
    copied = copy.deepcopy(model)
    for unit in reversed(find_units(copied, units, ())):
        fully_shard(list(unit.modules), mesh=mesh, strategy=strategy)
    optimizer = factory(list(copied.named_parameters()))

    def step() -> None:
        forward(copied).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _optimizer_step(
    mesh: DeviceMesh, nbytes: int, factory: OptimizerFactory
) -> Callable[[], object]:
    watch_optimizers()
    model = nn.Module()
    for i in range(_OPTIMIZER_TENSORS):
        rows = max(1, nbytes // _OPTIMIZER_TENSORS // 256)
        tensor = torch.zeros(64, rows, device=device_of(mesh))
        model.register_parameter(f"tensor_{i}", nn.Parameter(tensor))
    fully_shard(model, mesh=mesh)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    return factory(list(model.named_parameters())).step
