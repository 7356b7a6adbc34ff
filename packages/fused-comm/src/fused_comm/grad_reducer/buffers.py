"""The memory of buckets: torch's allocator, or any allocator of `FlatBuffer`s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from fused_comm import _compat
from fused_comm.bucket import Bucket, Route

__all__ = ["Allocate", "BucketPlan", "BufferPool", "FlatBuffer", "allocate"]


class FlatBuffer(Protocol):
    """Flat memory for one bucket.

    A gradient that was all-reduced is a view of it, so it is released when the bucket's next
    gradients are in another buffer, and not before.
    """

    @property
    def data(self) -> torch.Tensor:
        """The memory: 1-D and contiguous, of the requested elements, dtype and device."""
        ...

    def release(self) -> None:
        """Releases the memory; called when no gradient uses it."""
        ...


# Elements, dtype, device.
Allocate: TypeAlias = Callable[[int, torch.dtype, torch.device], FlatBuffer]


@dataclass(frozen=True, eq=False)
class _TorchBuffer:
    data: torch.Tensor

    def release(self) -> None:
        """Does nothing: torch counts the views."""


def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> FlatBuffer:
    """Makes a buffer of torch's allocator."""
    return _TorchBuffer(torch.empty(numel, dtype=dtype, device=device))


@dataclass
class BucketPlan:
    """The buckets for one choice of deferred axes, and the buffers of their gradients.

    Attributes:
        buckets: in the order in which they are launched.
        bucket_of: the number of the bucket of each parameter.
        largest: per route, the elements of its largest bucket.
        planned: how many of the known gradients are in buckets.
        allocated: per bucket, the buffers that gradients may still be views of, the newest last.
    """

    buckets: list[Bucket] = field(default_factory=list)
    bucket_of: dict[int, int] = field(default_factory=dict)
    largest: dict[Route, int] = field(default_factory=dict)
    planned: int = 0
    allocated: list[list[FlatBuffer]] = field(default_factory=list)

    def add(self, bucket: Bucket) -> None:
        """Adds a bucket behind the others."""
        for slot in bucket.slots:
            self.bucket_of[slot.item.index] = len(self.buckets)
        self.buckets.append(bucket)
        self.largest[bucket.route] = max(bucket.numel, self.largest.get(bucket.route, 0))
        self.allocated.append([])


class BufferPool:
    """Gives buckets their memory, and releases it when their gradients are elsewhere.

    Args:
        allocate: makes the buffers.
        zero_copy: whether gradients are accumulated in the buffer of their bucket.
    """

    def __init__(self, allocate: Allocate, zero_copy: bool) -> None:
        self._allocate, self._zero_copy = allocate, zero_copy
        # The inputs of reduce-scatters: two for each route.
        self._scatter_inputs: dict[tuple[Route, int], FlatBuffer] = {}

    def accumulates_in(self, bucket: Bucket, second_round: bool) -> bool:
        """Whether gradients are views of the buffer that is sent, before and after."""
        return self._zero_copy and not second_round and not bucket.route.scattered

    def buffer_of(self, plan: BucketPlan, number: int, second_round: bool) -> torch.Tensor:
        """Returns memory to pack a bucket into.

        Args:
            plan: with the bucket.
            number: of the bucket.
            second_round: as in `InFlightBucket`.
        """
        bucket = plan.buckets[number]
        if bucket.route.rows == 1:
            return self._gradient_buffer(plan, number, second_round).data
        # No gradient is a view of it, so two buffers are enough: one is filled, one is sent.
        key, size = (bucket.route, number % 2), plan.largest[bucket.route]
        buffer = self._scatter_inputs.get(key)
        if buffer is None or buffer.data.numel() < size:
            if buffer is not None:
                buffer.release()
            buffer = self._allocate(size, bucket.route.dtype, bucket.route.device)
            self._scatter_inputs[key] = buffer
        return buffer.data[: bucket.numel]

    def _gradient_buffer(self, plan: BucketPlan, number: int, second_round: bool) -> FlatBuffer:
        bucket, allocated = plan.buckets[number], plan.allocated[number]
        if allocated and self.accumulates_in(bucket, second_round):
            return allocated[0]
        if allocated and not _compat.is_viewed(allocated[-1].data):
            return allocated[-1]
        allocated.append(self._allocate(bucket.numel, bucket.route.dtype, bucket.route.device))
        if bucket.route.has_blocks:
            allocated[-1].data.zero_()
        return allocated[-1]

    def release_unused(self, plan: BucketPlan, number: int, second_round: bool) -> None:
        """Releases the buffers of a bucket that its gradients are no longer in."""
        allocated = plan.allocated[number]
        if not allocated or (self._zero_copy and second_round):
            return
        in_use = self.accumulates_in(plan.buckets[number], second_round)
        current = allocated[0] if in_use else allocated[-1]
        for buffer in allocated:
            if buffer is not current:
                buffer.release()
        allocated[:] = [current]
