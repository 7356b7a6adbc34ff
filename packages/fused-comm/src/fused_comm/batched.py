"""Many DTensors redistributed together: one collective for those that go the same way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fused_comm.moves import Moves

__all__ = [
    "Pending",
    "all_gather_many",
    "all_reduce_many",
    "redistribute_many",
    "reduce_scatter_many",
]

Placements: TypeAlias = Sequence[Placement]


class Pending:
    """Results that are on their way."""

    def __init__(self, finish: Callable[[], list[DTensor]]) -> None:
        self._finish = finish
        self._results: list[DTensor] | None = None

    def wait(self) -> list[DTensor]:
        """The results, in the order of the tensors; waits for them the first time."""
        if self._results is None:
            self._results = self._finish()
        return self._results


class _Redistribute(torch.autograd.Function):
    """Gradients go back as torch's `Redistribute` sends them, and together."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.sources = [tensor._spec for tensor in tensors]
        return tuple(moves.land())

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[DTensor | None, ...]:
        numbers = [number for number, grad in enumerate(grads) if grad is not None]
        given = [grad for grad in grads if grad is not None]
        targets = [
            _back(grad.placements, ctx.sources[number].placements)
            for number, grad in zip(numbers, given, strict=True)
        ]
        found: list[DTensor | None] = [None] * len(grads)
        for number, result in zip(numbers, redistribute_many(given, targets), strict=True):
            found[number] = result
        return (None, *found)


@overload
def redistribute_many(
    tensors: Sequence[DTensor], placements: Placements | Sequence[Placements]
) -> list[DTensor]: ...
@overload
def redistribute_many(
    tensors: Sequence[DTensor],
    placements: Placements | Sequence[Placements],
    *,
    async_op: Literal[True],
) -> Pending: ...
def redistribute_many(
    tensors: Sequence[DTensor],
    placements: Placements | Sequence[Placements],
    *,
    async_op: bool = False,
) -> list[DTensor] | Pending:
    """Redistributes DTensors, those that go the same way in one collective.

    The same way is: an all-reduce, reduce-scatter, all-gather or all-to-all over the same mesh
    axes (several at a time are one group, but for the all-to-all), of one dtype. Uneven shards are
    padded in the buffer. From one `RaggedShard` to another (`runs.HoldsRuns`), as from shards to
    an owner of each tensor, only what changes its rank travels, in one all-to-all. What needs
    several kinds goes alone, by `DTensor.redistribute`. Autograd sends gradients back together too,
    to the placements that the tensors had, or to replicas where they were Partial.

    Args:
        tensors: on any meshes, in the same order on all ranks.
        placements: for all, or a sequence of them, one for each.
        async_op: returns at once; the results are what `wait()` returns.

    Returns:
        the results, in the order of the tensors; or a `Pending` that has them.

    Raises:
        ValueError: not as many placements as tensors, or as mesh axes.
    """
    targets = _targets(tensors, placements)
    moves = Moves(tensors, targets)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        apply: Callable[..., tuple[DTensor, ...]] = _Redistribute.apply  # not annotated
        pending = Pending(lambda: list(apply(moves, *tensors)))
    else:
        pending = Pending(moves.land)
    return pending if async_op else pending.wait()


def all_gather_many(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Replicates every Shard of the tensors, together; see `redistribute_many`.

    Raises:
        ValueError: a tensor is Partial somewhere.
    """
    for number, tensor in enumerate(tensors):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise ValueError(
                f"all_gather_many: tensor {number} is {tensor.placements}: a Partial has to be "
                f"reduced first; redistribute_many does both"
            )
    return redistribute_many(
        tensors,
        [[Replicate() if isinstance(p, Shard) else p for p in t.placements] for t in tensors],
    )


def all_reduce_many(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Sums what is Partial into replicas, together; see `redistribute_many`."""
    return redistribute_many(
        tensors,
        [[Replicate() if isinstance(p, Partial) else p for p in t.placements] for t in tensors],
    )


def reduce_scatter_many(tensors: Sequence[DTensor], dim: int | Sequence[int] = 0) -> list[DTensor]:
    """Sums what is Partial into shards, together; see `redistribute_many`.

    Args:
        tensors: any.
        dim: that is sharded, of all or one for each.

    Raises:
        ValueError: not as many dims as tensors.
    """
    many = [dim] * len(tensors) if isinstance(dim, SupportsIndex) else dim
    dims = list(map(operator.index, many))
    if len(dims) != len(tensors):
        raise ValueError(f"reduce_scatter_many: {len(dims)} dims for {len(tensors)} tensors")
    return redistribute_many(
        tensors,
        [
            [
                Shard(operator.index(where)) if isinstance(p, Partial) else p
                for p in tensor.placements
            ]
            for tensor, where in zip(tensors, dims, strict=True)
        ],
    )


def _targets(
    tensors: Sequence[DTensor], placements: Placements | Sequence[Placements]
) -> list[tuple[Placement, ...]]:
    common = all(isinstance(one, Placement) for one in placements)
    each: Any = [placements] * len(tensors) if common else placements
    if len(each) != len(tensors):
        raise ValueError(
            f"redistribute_many: placements for {len(each)} tensors, and {len(tensors)} tensors"
        )
    targets = [tuple(one) for one in each]
    for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if len(target) != tensor.device_mesh.ndim:
            raise ValueError(
                f"redistribute_many: tensor {number} is on {tensor.device_mesh}: {target} must be "
                f"one placement per axis"
            )
    return targets


def _back(grad: Placements, source: Placements) -> list[Placement]:
    """As torch/distributed/tensor/_redistribute.py: nothing whole is made Partial."""
    return [
        Replicate() if isinstance(to, Partial) and not isinstance(is_now, Partial) else to
        for is_now, to in zip(grad, source, strict=True)
    ]
