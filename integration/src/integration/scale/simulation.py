"""Runs the measurements, counts and predictions of a report."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from integration.scale.cost import PredictedStepTime, step_time
from integration.scale.curves import Curve, model_scaling, strong_scaling, weak_scaling
from integration.scale.dispatch import DispatchTime, measure_dispatch
from integration.scale.initialisation import Initialisation, measure
from integration.scale.options import ScaleSetup
from integration.scale.padding import Padding, paddings
from integration.scale.shapes import Shape
from integration.scale.strategies import ParallelStrategy, strategies_of
from integration.scale.traffic import CountedStep, count

__all__ = ["Scale", "simulate"]

SIZES = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
GROWS_ON = 1024


@dataclass(frozen=True)
class Scale:
    """The results of a simulation.

    Attributes:
        counts: counted step of each model, strategy and world.
        times: predicted times of ``counts``, with the tokens of weak scaling.
        paddings: padding of the planner.
        initialisations: measured initialisations, if any.
        dispatches: measured dispatch times, if any.
        weak: predicted throughput by ranks, weak scaling.
        strong: predicted throughput by ranks, strong scaling.
        grown: predicted MFU by parameters.
    """

    counts: tuple[CountedStep, ...]
    times: tuple[PredictedStepTime, ...]
    paddings: tuple[Padding, ...]
    initialisations: tuple[Initialisation, ...]
    dispatches: tuple[DispatchTime, ...]
    weak: tuple[Curve, ...]
    strong: tuple[Curve, ...]
    grown: tuple[Curve, ...]


def simulate(setup: ScaleSetup, begin: Callable[[str, int, int], None]) -> Scale:
    """Measures, counts and predicts, with one thread.

    Args:
        setup: the validated options.
        begin: called when a measurement or count begins, with what it is, its number and their
            total.
    """
    torch.set_num_threads(1)
    options, machine = setup.options, setup.machine
    cases = [
        (shape, strategy, ranks)
        for shape in setup.shapes
        for strategy in _chosen(setup, shape)
        for ranks in setup.worlds
    ]
    initialised = cases if options.initialisation else []
    dense = [case for case in cases if not case[0].depth.experts]
    dispatches = dense if options.dispatch else []
    total = len(cases) + len(initialised) + len(dispatches) + 1
    number = itertools.count(1)

    def started(doing: str, shape: Shape, strategy: ParallelStrategy, ranks: int) -> None:
        what = f"{doing} {shape.name}, {strategy.name}, {ranks:,} ranks"
        begin(what, next(number), total)

    counts, begun, dispatched = [], [], []
    for case in cases:
        started("counting", *case)
        counts.append(count(*case))
    for shape, strategy, ranks in initialised:
        started("initialising", shape, strategy, ranks)
        begun.append(measure(shape.name, strategy.name, ranks))
    for case in dispatches:
        started("dispatching", *case)
        dispatched.append(measure_dispatch(*case))
    begin("padding and model scaling", total, total)
    padded = [one for shape in setup.shapes for one in paddings(shape.name, setup.worlds)]
    grown = []
    if setup.grows is not None:
        sharded = [
            strategy
            for strategy in _chosen(setup, setup.grows)
            if strategy.sharded and not strategy.tensor
        ]
        grown = model_scaling(setup.grows, sharded, GROWS_ON, SIZES, machine, options.weak_tokens)
    own = [one.sharing * options.weak_tokens for one in counts]
    return Scale(
        tuple(counts),
        tuple(step_time(one, machine, tokens) for one, tokens in zip(counts, own, strict=True)),
        tuple(padded), tuple(begun), tuple(dispatched),
        tuple(weak_scaling(counts, machine, options.weak_tokens)),
        tuple(
            curve for batch in setup.batches for curve in strong_scaling(counts, machine, batch)
        ),
        tuple(grown),
    )  # fmt: skip


def _chosen(setup: ScaleSetup, shape: Shape) -> list[ParallelStrategy]:
    return [strategy for strategy in strategies_of(shape) if strategy.name in setup.strategies]
