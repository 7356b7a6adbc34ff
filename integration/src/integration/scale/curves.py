"""Predicts weak, strong and model scaling, as in veScale-FSDP, section 6.2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from integration.scale.cost import Machine, step_time, throughput
from integration.scale.shapes import Depth, Shape
from integration.scale.strategies import ParallelStrategy
from integration.scale.traffic import CountedStep, count

__all__ = ["Curve", "CurvePoint", "Sized", "model_scaling", "strong_scaling", "weak_scaling"]


@dataclass(frozen=True)
class CurvePoint:
    """A predicted step.

    Attributes:
        x: number of ranks, or of parameters of the model.
        tokens: tokens of a rank in a step; its share where ranks have the same data.
        seconds: seconds of the step.
        throughput: tokens per second of all ranks.
        mfu: FLOP/s of the ranks over their peak; redundant compute counts.
    """

    x: float
    tokens: float
    seconds: float
    throughput: float
    mfu: float


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    Attributes:
        model: name of the model.
        strategy: name of the strategy.
        label: label of the line.
        points: points, ascending.
    """

    model: str
    strategy: str
    label: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class Sized:
    """A model with another depth and width than the published one.

    Attributes:
        parameters: number of parameters.
        depth: number of layers.
        width: factor of the inner sizes of its MLPs.
    """

    parameters: int
    depth: Depth
    width: float


def weak_scaling(counts: Iterable[CountedStep], machine: Machine, tokens: int) -> list[Curve]:
    """Returns a curve per model and strategy, with constant tokens per rank."""
    return _curves(counts, machine, lambda _: tokens, lambda one: one.strategy)


def strong_scaling(counts: Iterable[CountedStep], machine: Machine, batch: int) -> list[Curve]:
    """Returns a curve per model and strategy, with a constant global batch."""
    label = f"{batch / 2**20:,.0f} M tokens"
    return _curves(counts, machine, lambda one: batch / one.ranks, lambda _: label)


def model_scaling(
    shape: Shape, strategies: Sequence[ParallelStrategy], ranks: int, sizes: Sequence[float],
    machine: Machine, tokens: int, counted: Callable[..., CountedStep] = count,
) -> list[Curve]:  # fmt: skip
    """Returns a curve per strategy of a model that grows in depth and width, on the same ranks.

    Args:
        shape: the published model.
        strategies: strategies to compare.
        ranks: size of the world.
        sizes: factors of depth and width.
        machine: the cluster.
        tokens: tokens of a rank.
        counted: function that counts a step, by default `count`.
    """
    curves = []
    models = [sized(shape, size) for size in sizes]
    for strategy in strategies:
        points = []
        for model in models:
            one = counted(shape, strategy, ranks, depth=model.depth, width=model.width)
            points.append(_point(one, machine, tokens, model.parameters))
        curves.append(Curve(shape.name, strategy.name, strategy.name, tuple(points)))
    return curves


def sized(shape: Shape, size: float) -> Sized:
    """Returns a model with ``size`` times the layers and inner sizes.

    In a model with experts, the number of dense layers does not change.
    """
    depth = shape.depth
    if depth.experts:
        made = Depth(depth.dense, max(1, round(depth.experts * size)))
    else:
        made = Depth(max(1, round(depth.dense * size)), 0)
    one = Depth(min(1, made.dense), min(1, made.experts))
    two = Depth(one.dense + (not depth.experts), one.experts + bool(depth.experts))
    first, second = (_parameters(shape, here, size) for here in (one, two))
    if made.dense and made.experts:
        dense = _parameters(shape, Depth(one.dense + 1, one.experts), size) - first
        first += (made.dense - 1) * dense
    repeated = made.experts if depth.experts else made.dense
    base = _parameters(shape, one, size)
    return Sized(first + (repeated - 1) * (second - base), made, size)


def _parameters(shape: Shape, depth: Depth, width: float) -> int:
    return sum(param.numel() for param in shape.build(depth, width).parameters())


def _curves(
    counts: Iterable[CountedStep], machine: Machine, tokens: Callable[[CountedStep], float],
    label: Callable[[CountedStep], str],
) -> list[Curve]:  # fmt: skip
    lines: dict[tuple[str, str, str], list[CurvePoint]] = {}
    for one in sorted(counts, key=lambda one: one.ranks):
        point = _point(one, machine, tokens(one), one.ranks)
        lines.setdefault((one.model, one.strategy, label(one)), []).append(point)
    return [Curve(*key, tuple(points)) for key, points in lines.items()]


def _point(one: CountedStep, machine: Machine, tokens: float, x: float) -> CurvePoint:
    own = tokens * one.sharing  # of all ranks with the same data
    time = step_time(one, machine, own)
    flops = one.whole.flops * own / one.tokens
    return CurvePoint(
        x, tokens, time.total, throughput(one, time, own), flops / time.total / machine.peak
    )
