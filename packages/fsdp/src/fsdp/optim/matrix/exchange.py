"""Gathers matrices on their owners and sends results back, overlapped with the computation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch.distributed.tensor import Replicate

from fsdp.optim.matrix.assignment import MatrixTask
from fused_comm import Pending, redistribute_many

__all__ = ["compute_on_owners"]

Compute: TypeAlias = Callable[[MatrixTask, torch.Tensor], torch.Tensor]
LocalPart: TypeAlias = Callable[[MatrixTask], torch.Tensor]
Apply: TypeAlias = Callable[[MatrixTask, torch.Tensor], None]


def compute_on_owners(
    tasks: Sequence[MatrixTask],
    local_part: LocalPart,
    compute: Compute,
    apply: Apply,
    bucket_elements: int,
) -> None:
    """Gathers each matrix on its owner, computes there, and sends the result back.

    Each bucket of matrices is one collective to the owners and one back. The next bucket is
    gathered and the results of the one before are sent while owners compute. Matrices that need no
    exchange are computed first, during the first gather.

    Args:
        tasks: the same on all ranks.
        local_part: returns this rank's elements of a matrix, flat, in the dtype that is sent.
        compute: maps a matrix to a result of the same shape; is called on its owner only.
        apply: takes this rank's elements of the result, flat.
        bucket_elements: elements of the matrices of a bucket; a larger matrix is a bucket alone.
    """
    buckets = _buckets([task for task in tasks if task.needs_exchange], bucket_elements)
    next_gather = _GatherToOwners(buckets[0], local_part) if buckets else None
    local_tasks = [task for task in tasks if not task.needs_exchange and task.is_mine]
    bases = [local_part(task).view(task.matrix.base_shape) for task in local_tasks]
    for task, result in zip(local_tasks, _results(local_tasks, bases, compute), strict=True):
        apply(task, result.reshape(-1))
    del bases
    last_return: _ReturnToShards | None = None
    for index in range(len(buckets)):
        assert next_gather is not None
        gather = next_gather
        more = index + 1 < len(buckets)
        next_gather = _GatherToOwners(buckets[index + 1], local_part) if more else None
        previous_return, last_return = last_return, gather.compute(compute)
        if previous_return is not None:
            previous_return.wait(apply)
    if last_return is not None:
        last_return.wait(apply)


class _GatherToOwners:
    """A bucket that is being gathered on the owners of its matrices."""

    def __init__(self, tasks: Sequence[MatrixTask], local_part: LocalPart) -> None:
        self._tasks = tasks
        parts = [task.base_dtensor(local_part(task), task.sharded_placements) for task in tasks]
        self._pending = redistribute_many(
            parts, [task.owned_placements for task in tasks], async_op=True
        )

    def compute(self, compute: Compute) -> _ReturnToShards:
        """Waits for the bucket, computes on this rank's matrices, and starts to send results."""
        locals_ = [owned._local_tensor for owned in self._pending.wait()]
        mine = [index for index, task in enumerate(self._tasks) if task.is_mine]
        results = _results(
            [self._tasks[index] for index in mine], [locals_[index] for index in mine], compute
        )
        for index, result in zip(mine, results, strict=True):
            locals_[index] = result
        return _ReturnToShards(self._tasks, locals_)


class _ReturnToShards:
    """The results of a bucket, which are being sent to the ranks that have the shards."""

    def __init__(self, tasks: Sequence[MatrixTask], locals_: Sequence[torch.Tensor]) -> None:
        self._tasks = tasks
        owned = [
            task.base_dtensor(local, task.owned_placements)
            for task, local in zip(tasks, locals_, strict=True)
        ]
        self._pending: Pending = redistribute_many(
            owned, [task.sharded_placements for task in tasks], async_op=True
        )

    def wait(self, apply: Apply) -> None:
        """Waits for the results and applies this rank's elements of them."""
        for task, part in zip(self._tasks, self._pending.wait(), strict=True):
            apply(task, part._local_tensor)


def _results(
    tasks: Sequence[MatrixTask], bases: Sequence[torch.Tensor], compute: Compute
) -> list[torch.Tensor]:
    """Computes on bases that are on this rank, after gathering those that inner axes shard."""
    matrices = list(bases)
    inner = [index for index, task in enumerate(tasks) if task.matrix.is_inner_sharded]
    if inner:
        gathered = redistribute_many(
            [tasks[n].inner_dtensor(bases[n], tasks[n].inner_placements) for n in inner],
            [[Replicate()] * len(tasks[n].inner_placements) for n in inner],
        )
        for index, one in zip(inner, gathered, strict=True):
            matrices[index] = one._local_tensor
    results = []
    for task, matrix in zip(tasks, matrices, strict=True):
        result = compute(task, matrix)
        if task.matrix.is_inner_sharded:
            replicated = [Replicate()] * len(task.inner_placements)
            full = task.inner_dtensor(result.contiguous(), replicated)
            result = full.redistribute(placements=task.inner_placements).to_local()
        results.append(result)
    return results


def _buckets(tasks: Sequence[MatrixTask], limit: int) -> list[list[MatrixTask]]:
    """Takes each owner's largest matrix in turn, so that every bucket has work for all owners."""
    turns: Counter[int | None] = Counter()
    ordered = []
    for task in sorted(tasks, key=lambda task: (-task.cost, task.index)):
        ordered.append((turns[task.owner], task.index, task))
        turns[task.owner] += 1
    buckets: list[list[MatrixTask]] = []
    remaining = 0
    for _, _, task in sorted(ordered, key=lambda one: one[:2]):
        size = math.prod(task.matrix.base_shape)
        if not buckets or size > remaining:
            buckets.append([])
            remaining = limit
        buckets[-1].append(task)
        remaining -= size
    return buckets
