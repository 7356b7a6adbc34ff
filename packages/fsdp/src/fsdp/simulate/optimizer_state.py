"""The bytes of an optimizer's state, of each parameter and on each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from fsdp.simulate.simulated_model import PlannedGroup
from ragged_shard.planner import Layout

__all__ = [
    "OPTIMIZERS", "OptimizerFactory", "OptimizerLike", "StateBytes", "optimizer_bytes",
    "state_bytes_of",
]  # fmt: skip

OptimizerFactory: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
OptimizerLike: TypeAlias = "str | float | OptimizerFactory"

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class StateBytes:
    """The size of one parameter's state.

    Attributes:
        per_element: bytes per element of a rank's shard.
        per_rank: bytes on every rank, such as those of the step count.
    """

    per_element: float
    per_rank: int


def state_bytes_of(
    optimizer: OptimizerLike, named: Sequence[tuple[str, nn.Parameter]]
) -> dict[nn.Parameter, StateBytes]:
    """Returns the size of the state of each parameter that requires grad.

    A factory is called with copies of the parameters on meta, and the optimizer does one step. A
    rank has the same fraction of a state tensor as of the parameter, but all of a scalar.

    Args:
        optimizer: "adam", "adamw", "sgd"; bytes per element; or a factory that returns an optimizer
            of named parameters.
        named: parameters and their names.

    Raises:
        ValueError: `optimizer` is none of these, or cannot step on meta.
    """
    trained = [(name, param) for name, param in named if param.requires_grad]
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool):
        if not optimizer >= 0:
            raise ValueError(
                f"simulate: expected optimizer to be 0 or more bytes per element, got {optimizer!r}"
            )
        return {param: StateBytes(float(optimizer), 0) for _, param in trained}
    factory = OPTIMIZERS.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(factory):
        raise ValueError(
            f"simulate: expected optimizer to be one of {sorted(OPTIMIZERS)}, bytes per element, "
            f"or a function that returns an optimizer of named parameters, got {optimizer!r}"
        )
    copies = [(name, nn.Parameter(param.detach().to("meta"))) for name, param in trained]
    for _, param in copies:
        param.grad = torch.empty_like(param)
    try:
        on_meta = factory(copies)
        on_meta.step()
    except RuntimeError as error:  # fused optimizers and some kernels do not support meta
        raise ValueError(
            f"simulate: expected optimizer {factory!r} to step on meta, got {error}; create it "
            f"without options that need a device (fused=True), or pass its bytes per element"
        ) from error
    return {
        param: _state_bytes(on_meta.state.get(copy, {}), param.numel())
        for (_, param), (_, copy) in zip(trained, copies, strict=True)
    }


def optimizer_bytes(
    groups: Sequence[PlannedGroup], state_bytes: Mapping[nn.Parameter, StateBytes]
) -> torch.Tensor:
    """Returns the bytes of optimizer state on each rank of the layout: (ranks,), int64."""
    ranks = groups[0].layout.world_size if groups else 1
    total = torch.zeros(ranks, dtype=torch.float64)
    counts = Counter(  # the layers of a model often have one layout, and state of the same sizes
        (group.layout, group.is_replicated, tuple(state_bytes[param] for param in group.params))
        for group in groups
        if group.trained
    )
    for (layout, is_replicated, states), count in counts.items():
        for i, state in enumerate(states):
            elements = _elements_by_rank(layout, i).double()
            if is_replicated:
                elements = elements.sum().expand(ranks)
            total += count * (elements * state.per_element + state.per_rank)
    return total.round().long()


def _elements_by_rank(layout: Layout, i: int) -> torch.Tensor:
    """Returns the elements of tensor `i` on each rank: (ranks,), int64."""
    elements = torch.zeros(layout.world_size, dtype=torch.int64)
    owners = layout.owners(i)
    if owners:
        elements[owners.start : owners.stop] = layout.shard_size
        for rank in (owners.start, owners.stop - 1):  # shards between these have nothing else
            elements[rank] = layout.part(i, rank).size
    return elements


def _state_bytes(state: Mapping[str, Any], numel: int) -> StateBytes:
    sharded, per_rank = 0, 0
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            continue
        if value.ndim == 0:
            per_rank += value.nbytes
        else:
            sharded += value.nbytes
    return StateBytes(sharded / max(numel, 1), per_rank)
