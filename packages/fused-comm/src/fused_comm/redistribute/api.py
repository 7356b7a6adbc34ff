"""Redistributes many DTensors together, one collective for those that need the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fused_comm.redistribute.batch import RedistributionBatch

__all__ = [
    "Pending",
    "all_gather_many",
    "all_reduce_many",
    "redistribute_many",
    "reduce_scatter_many",
]

Placements: TypeAlias = Sequence[Placement]


class Pending:
    """Results of redistributions that are under way."""

    def __init__(self, wait: Callable[[], list[DTensor]]) -> None:
        self._wait = wait
        self._results: list[DTensor] | None = None

    def wait(self) -> list[DTensor]:
        """Returns the results, in the order of the tensors; waits for them the first time."""
        if self._results is None:
            self._results = self._wait()
        return self._results


class _Redistribute(torch.autograd.Function):
    """Redistributes gradients to the placements of torch's `Redistribute`, and together."""

    @staticmethod
    def forward(ctx: Any, batch: RedistributionBatch, *tensors: DTensor) -> tuple[DTensor, ...]:
        ctx.sources = [tensor._spec for tensor in tensors]
        return tuple(batch.wait())

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> tuple[DTensor | None, ...]:
        numbers = [number for number, grad in enumerate(grads) if grad is not None]
        present = [grad for grad in grads if grad is not None]
        targets = [
            _grad_placements(grad.placements, ctx.sources[number].placements)
            for number, grad in zip(numbers, present, strict=True)
        ]
        results: list[DTensor | None] = [None] * len(grads)
        for number, result in zip(numbers, redistribute_many(present, targets), strict=True):
            results[number] = result
        return (None, *results)


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
    """Redistributes DTensors, those that need the same collective in one.

    Tensors share an all-reduce, reduce-scatter, all-gather or all-to-all over the same mesh axes
    (several axes are one group, except for the all-to-all) and of one dtype. Uneven shards are
    padded in the buffer. From one `RaggedShard` to another (`exchanges.FlatRangePlacement`), as
    from shards to an owner of each tensor, one all-to-all sends only elements that change their
    rank. A tensor that needs several kinds of collectives is redistributed by itself, by
    `DTensor.redistribute`. Gradients are redistributed together too, to the placements of the
    tensors, or to Replicate where those were Partial.

    Args:
        tensors: on any meshes, in the same order on all ranks.
        placements: for all, or a sequence of them, one for each.
        async_op: returns at once a `Pending`, whose `wait()` returns the results.

    Returns:
        The results, in the order of the tensors; or a `Pending` of them.

    Raises:
        ValueError: the number of placements is not that of the tensors, or of the mesh axes.
    """
    targets = _targets(tensors, placements)
    batch = RedistributionBatch(tensors, targets)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        apply: Callable[..., tuple[DTensor, ...]] = _Redistribute.apply  # not annotated
        pending = Pending(lambda: list(apply(batch, *tensors)))
    else:
        pending = Pending(batch.wait)
    return pending if async_op else pending.wait()


def all_gather_many(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Replicates every Shard of the tensors, together; see `redistribute_many`.

    Raises:
        ValueError: a tensor is Partial on some axis.
    """
    for number, tensor in enumerate(tensors):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            raise ValueError(
                f"all_gather_many: expected Shard and Replicate, got {tensor.placements} for "
                f"tensor {number}; redistribute_many also reduces what is Partial"
            )
    return redistribute_many(
        tensors,
        [[Replicate() if isinstance(p, Shard) else p for p in t.placements] for t in tensors],
    )


def all_reduce_many(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Reduces every Partial of the tensors to Replicate, together; see `redistribute_many`."""
    return redistribute_many(
        tensors,
        [[Replicate() if isinstance(p, Partial) else p for p in t.placements] for t in tensors],
    )


def reduce_scatter_many(tensors: Sequence[DTensor], dim: int | Sequence[int] = 0) -> list[DTensor]:
    """Reduces every Partial of the tensors to Shard, together; see `redistribute_many`.

    Args:
        tensors: any.
        dim: the dim that is sharded, of all tensors, or one for each.

    Raises:
        ValueError: the number of dims is not that of the tensors.
    """
    many = [dim] * len(tensors) if isinstance(dim, SupportsIndex) else dim
    dims = list(map(operator.index, many))
    if len(dims) != len(tensors):
        raise ValueError(
            f"reduce_scatter_many: expected one dim, or one for each of {len(tensors)} tensors, "
            f"got {len(dims)} dims"
        )
    return redistribute_many(
        tensors,
        [
            [Shard(tensor_dim) if isinstance(p, Partial) else p for p in tensor.placements]
            for tensor, tensor_dim in zip(tensors, dims, strict=True)
        ],
    )


def _targets(
    tensors: Sequence[DTensor], placements: Placements | Sequence[Placements]
) -> list[tuple[Placement, ...]]:
    common = all(isinstance(placement, Placement) for placement in placements)
    each: Any = [placements] * len(tensors) if common else placements
    if len(each) != len(tensors):
        raise ValueError(
            f"redistribute_many: expected placements for {len(tensors)} tensors, got {len(each)}"
        )
    targets = [tuple(one) for one in each]
    for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
        if len(target) != tensor.device_mesh.ndim:
            raise ValueError(
                f"redistribute_many: expected one placement per axis of {tensor.device_mesh} for "
                f"tensor {number}, got {target}"
            )
    return targets


def _grad_placements(grad: Placements, source: Placements) -> list[Placement]:
    """Returns the gradient's placements as torch's _redistribute.py: never Partial again."""
    return [
        Replicate() if isinstance(to, Partial) and not isinstance(current, Partial) else to
        for current, to in zip(grad, source, strict=True)
    ]
