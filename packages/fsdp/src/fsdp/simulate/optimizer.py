"""The state of an optimizer: what it keeps of each parameter, found by one step on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ragged_shard.planner import Layout

__all__ = ["Kept", "OptimizerLike", "held_by_rank", "kept_by"]

Factory: TypeAlias = Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
OptimizerLike: TypeAlias = "str | float | Factory"

KNOWN: dict[str, Factory] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Kept:
    """What is kept of one parameter.

    Attributes:
        per_element: bytes for each of its elements that a rank has.
        per_rank: bytes on every rank, as those of the number of steps.
    """

    per_element: float
    per_rank: int


def kept_by(
    optimizer: OptimizerLike, named: Sequence[tuple[str, nn.Parameter]]
) -> dict[nn.Parameter, Kept]:
    """The state of each parameter that is trained.

    Args:
        optimizer: "adam", "adamw", "sgd"; bytes for each element; or what makes an optimizer of
            named parameters. One is made of meta tensors and stepped once; a rank's share of a
            state is its share of the parameter, but for states of one element.
        named: parameters.

    Raises:
        ValueError: none of these; an optimizer that cannot step on meta.
    """
    trained = [(name, param) for name, param in named if param.requires_grad]
    if isinstance(optimizer, int | float) and not isinstance(optimizer, bool):
        if not optimizer >= 0:
            raise ValueError(f"simulate: optimizer={optimizer!r} bytes; wants 0 or more")
        return {param: Kept(float(optimizer), 0) for _, param in trained}
    factory = KNOWN.get(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(factory):
        raise ValueError(
            f"simulate: optimizer={optimizer!r}; wants one of {sorted(KNOWN)}, bytes for each "
            f"element, or a function that makes an optimizer of named parameters"
        )
    copies = [(name, nn.Parameter(param.detach().to("meta"))) for name, param in trained]
    for _, param in copies:
        param.grad = torch.empty_like(param)
    try:
        made = factory(copies)
        made.step()
    except RuntimeError as error:  # a fused step refuses meta; some kernels it does not have
        raise ValueError(
            f"simulate: optimizer {factory!r} cannot step on meta, {error}; make it without what "
            f"a device needs (fused=True), or give its bytes for each element"
        ) from error
    return {
        param: _kept(made.state.get(copy, {}), param.numel())
        for (_, param), (_, copy) in zip(trained, copies, strict=True)
    }


def held_by_rank(layout: Layout, i: int) -> torch.Tensor:
    """How many elements of tensor `i` each rank has: (ranks,), int64."""
    held = torch.zeros(layout.world_size, dtype=torch.int64)
    owners = layout.owners(i)
    if owners:
        held[owners.start : owners.stop] = layout.shard_size
        for rank in (owners.start, owners.stop - 1):  # the others have nothing else
            held[rank] = layout.part(i, rank).size
    return held


def _kept(state: Mapping[str, Any], numel: int) -> Kept:
    shared, own = 0, 0
    for value in state.values():
        if not isinstance(value, torch.Tensor):
            continue
        if value.ndim == 0:
            own += value.nbytes
        else:
            shared += value.nbytes
    return Kept(shared / max(numel, 1), own)
