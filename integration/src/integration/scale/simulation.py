"""All that a report shows: what is measured, what is counted, what is predicted."""

from __future__ import annotations

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
    """What came out.

    Attributes:
        counts: of each model, way and world.
        times: predicted, of the counts, of so many tokens a rank as weak scaling has.
        paddings: of the planner.
        initialisations: measured, or none.
        dispatches: measured, or none.
        weak: throughput, by ranks.
        strong: throughput, by ranks.
        grown: MFU, by parameters.
    """

    counts: tuple[CountedStep, ...]
    times: tuple[PredictedStepTime, ...]
    paddings: tuple[Padding, ...]
    initialisations: tuple[Initialisation, ...]
    dispatches: tuple[DispatchTime, ...]
    weak: tuple[Curve, ...]
    strong: tuple[Curve, ...]
    grown: tuple[Curve, ...]


def simulate(setup: ScaleSetup, log: Callable[[str], None]) -> Scale:
    """Measure, count and predict; one thread.

    Args:
        setup: what is asked for.
        log: gets a line of text for each thing that begins.
    """
    torch.set_num_threads(1)
    options, machine = setup.options, setup.machine
    cases = [(shape, way) for shape in setup.shapes for way in _chosen(setup, shape)]
    counts, begun, dispatched = [], [], []
    for shape, way in cases:
        for ranks in setup.worlds:
            log(f"{shape.name}, {way.name}, {ranks:,} ranks: counting")
            counts.append(count(shape, way, ranks))
    for shape, way in cases if options.initialisation else []:
        for ranks in setup.worlds:
            log(f"{shape.name}, {way.name}, {ranks:,} ranks: beginning")
            begun.append(measure(shape.name, way.name, ranks))
    for shape, way in cases if options.dispatch else []:
        for ranks in setup.worlds if not shape.depth.experts else ():
            log(f"{shape.name}, {way.name}, {ranks:,} ranks: dispatching")
            dispatched.append(measure_dispatch(shape, way, ranks))
    log("planning, and growing a model")
    padded = [one for shape in setup.shapes for one in paddings(shape.name, setup.worlds)]
    grown = []
    if setup.grows is not None:
        sharded = [way for way in _chosen(setup, setup.grows) if way.sharded and not way.tensor]
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
    return [way for way in strategies_of(shape) if way.name in setup.ways]
