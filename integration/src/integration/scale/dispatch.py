"""What a layer costs the host beside its operators: hooks, placements, collectives that return.

Real steps of the model with tiny widths, so that operators take next to nothing, on rank 0 of a
fake world; what the same layer takes without any way is taken off.
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
    """Processor time of the host.

    Attributes:
        model: its name.
        way: its name.
        ranks: of the world.
        plain: seconds of a layer, forward and backward, on one device.
        layer: seconds of it by the way.
    """

    model: str
    way: str
    ranks: int
    plain: float
    layer: float

    @property
    def cost(self) -> float:
        """Seconds that the way adds to a layer."""
        return self.layer - self.plain


def measure_dispatch(
    shape: Shape, way: ParallelStrategy, ranks: int, rounds: int = 7
) -> DispatchTime:
    """Measures the least of some rounds, of two depths in turns; a layer is their difference.

    Args:
        shape: a model without experts, whose loops depend on numbers.
        way: how ranks share it.
        ranks: of the world.
        rounds: of each depth.

    Raises:
        ValueError: a model with experts.
    """
    if shape.depth.experts:
        raise ValueError(f"measure_dispatch: {shape.name} has experts; wants a model without")
    axes = axes_of(way, ranks)
    # A plan is given the whole batch and cuts it.
    batch = math.prod(axis.size for axis in axes if axis.name != "tp") if way.tensor else 1
    plain = _layer(shape, None, 1, rounds)
    with fake_mesh([axis.size for axis in axes], [axis.name for axis in axes]) as mesh:
        made = _layer(shape, lambda model: distribute(model, shape, way, mesh), batch, rounds)
    return DispatchTime(shape.name, way.name, ranks, plain, made)


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
