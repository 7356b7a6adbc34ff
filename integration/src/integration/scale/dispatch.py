"""Measures the host time that a strategy adds to a layer: hooks, placements, collectives.

Runs real steps of the model with tiny widths, so that operators take almost no time, on rank 0 of a
fake world, and subtracts the time of the same layer on one device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from integration.scale.shapes import Depth, Shape
from integration.scale.strategies import ParallelStrategy, axes_of, distribute
from testkit import fake_mesh

__all__ = ["DispatchTime", "measure_dispatch"]

_TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 64, "head_dim": 8,
}  # fmt: skip
_SEQUENCE = 8


@dataclass(frozen=True)
class DispatchTime:
    """CPU time of a layer, forward and backward.

    Attributes:
        model: name of the model.
        strategy: name of the strategy.
        ranks: size of the world.
        plain: seconds on one device.
        layer: seconds under the strategy.
    """

    model: str
    strategy: str
    ranks: int
    plain: float
    layer: float

    @property
    def cost(self) -> float:
        """Seconds that the strategy adds to a layer."""
        return self.layer - self.plain


def measure_dispatch(
    shape: Shape, strategy: ParallelStrategy, ranks: int, rounds: int = 7
) -> DispatchTime:
    """Measures two depths in turns and returns the difference of their minima, per layer.

    Args:
        shape: a model without experts, whose loops depend on data.
        strategy: the strategy.
        ranks: size of the world.
        rounds: number of measurements of each depth.

    Raises:
        ValueError: the model has experts.
    """
    if shape.depth.experts:
        raise ValueError(
            f"measure_dispatch: expected a model without experts, got {shape.name}; give another"
        )
    axes = axes_of(strategy, ranks)
    # A plan takes the global batch and shards it.
    batch = math.prod(axis.size for axis in axes if axis.name != "tp") if strategy.tensor else 1
    plain = _layer(shape, None, 1, rounds)
    with fake_mesh([axis.size for axis in axes], [axis.name for axis in axes]) as mesh:
        made = _layer(shape, lambda model: distribute(model, shape, strategy, mesh), batch, rounds)
    return DispatchTime(shape.name, strategy.name, ranks, plain, made)


def _layer(
    shape: Shape, put: Callable[[nn.Module], nn.Module] | None, batch: int, rounds: int
) -> float:
    import transformers

    steps = []
    for layers in (1, 3):
        values = shape.values(Depth(layers, 0)) | _TINY
        config = getattr(transformers, shape.config)(use_cache=False, **values)
        model: nn.Module = getattr(transformers, shape.model)(config)
        if put is not None:
            model = put(model)
        steps.append(_stepper(model, batch))
    least = [float("inf")] * 2
    for _ in range(rounds):
        for place, step in enumerate(steps):
            begun = time.process_time()
            step()
            least[place] = min(least[place], time.process_time() - begun)
    return (least[1] - least[0]) / 2


def _stepper(model: nn.Module, batch: int) -> Callable[[], None]:
    tokens = torch.zeros(batch, _SEQUENCE, dtype=torch.long)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()

    step()
    step()
    return step
