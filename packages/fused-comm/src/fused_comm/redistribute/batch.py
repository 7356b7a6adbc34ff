"""Sorts redistributions by the collective that they need, and starts those that share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fused_comm import _compat
from fused_comm.bucket import BucketItem, plan_buckets, route_of
from fused_comm.in_flight_bucket import InFlightBucket, shard_view
from fused_comm.process_groups import FlatGroup, flat_group
from fused_comm.redistribute.exchanges import (
    FlatRangeExchange,
    FlatRangeItem,
    FlatRangePlacement,
    ShardExchange,
    ShardItem,
)
from fused_comm.reduction import Reduction, reduction_to
from fused_comm.sharding import shards_are_chunks

__all__ = ["RedistributionBatch"]

_NO_LIMIT = 1 << 62


class RedistributionBatch:
    """Redistributions that are started together.

    ====================================  =====================================================
    source, target                        operation
    ====================================  =====================================================
    Partial to Replicate or Shard         buckets: all-reduce, reduce-scatter (`InFlightBucket`)
    Shard to Replicate                    all-gather (`ShardExchange`)
    Shard(i) to Shard(j) on one axis      all-to-all (`ShardExchange`)
    flat ranges to flat ranges            all-to-all of what changes its rank
                                          (`FlatRangeExchange`)
    anything else                         `DTensor.redistribute`, tensor by tensor
    ====================================  =====================================================

    Args:
        tensors: the DTensors.
        targets: the placements of each.
    """

    def __init__(
        self, tensors: Sequence[DTensor], targets: Sequence[tuple[Placement, ...]]
    ) -> None:
        self._tensors, self._targets = tensors, targets
        self._in_flight: list[InFlightBucket] = []
        self._exchanges: list[tuple[ShardExchange | FlatRangeExchange, list[int]]] = []
        self._single: list[int] = []
        items: list[BucketItem] = []
        shards: dict[tuple[FlatGroup, bool, torch.dtype], list[tuple[int, ShardItem]]] = {}
        ranges: dict[tuple[dist.ProcessGroup, torch.dtype], list[tuple[int, FlatRangeItem]]] = {}
        for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if (reduction := _reduction(tensor, target)) is not None:
                route = route_of(reduction, reduction.dtype, reduction.averaged)
                items.append(BucketItem(number, reduction, route))
            elif (shard := _shard_item(tensor, target)) is not None:
                flat, shard_item = shard
                key = (flat, bool(shard_item.split), shard_item.local.dtype)
                shards.setdefault(key, []).append((number, shard_item))
            elif (flat_range := _flat_range_item(tensor, target)) is not None:
                group, range_item = flat_range
                ranges.setdefault((group, range_item.local.dtype), []).append((number, range_item))
            else:
                self._single.append(number)
        self._launch_buckets(items)
        for (flat, _, _), numbered in shards.items():
            exchange = ShardExchange([item for _, item in numbered], flat)
            self._exchanges.append((exchange, [number for number, _ in numbered]))
        for (group, _), moved in ranges.items():
            sent = FlatRangeExchange([item for _, item in moved], group)
            self._exchanges.append((sent, [number for number, _ in moved]))

    def wait(self) -> list[DTensor]:
        """Waits for all of them and returns the results, outside of autograd."""
        results: dict[int, DTensor] = {}
        with torch.no_grad():
            for number in self._single:
                results[number] = self._tensors[number].redistribute(
                    placements=self._targets[number]
                )
        for in_flight in self._in_flight:
            row = in_flight.wait()
            for slot in in_flight.bucket.slots:
                number = slot.item.index
                results[number] = self._result(number, shard_view(slot, row))
        for exchange, numbers in self._exchanges:
            for number, local in zip(numbers, exchange.wait(), strict=True):
                results[number] = self._result(number, local)
        return [results[number] for number in range(len(self._tensors))]

    def _launch_buckets(self, items: Sequence[BucketItem]) -> None:
        for bucket in plan_buckets(items, _NO_LIMIT):
            names = [f"tensor {slot.item.index}" for slot in bucket.slots]
            buffer = torch.empty(bucket.numel, dtype=bucket.route.dtype, device=bucket.route.device)
            in_flight = InFlightBucket(bucket, names, buffer)
            in_flight.launch(
                {s.item.index: self._tensors[s.item.index]._local_tensor for s in bucket.slots}
            )
            self._in_flight.append(in_flight)

    def _result(self, number: int, local: torch.Tensor) -> DTensor:
        tensor = self._tensors[number]
        return _compat.dtensor(local, tensor, tensor.device_mesh, self._targets[number])


def _reduction(tensor: DTensor, target: tuple[Placement, ...]) -> Reduction | None:
    """Returns the reduction if the tensor needs only sums; else None."""
    changed = [(a, b) for a, b in zip(tensor.placements, target, strict=True) if a != b]
    operations = {source.reduce_op for source, _ in changed if isinstance(source, Partial)}
    sums = all(isinstance(a, Partial) and type(b) in (Replicate, Shard) for a, b in changed)
    if not changed or not sums or operations not in ({"sum"}, {"avg"}):
        return None
    scattered = [
        axis
        for axis, (source, to) in enumerate(zip(tensor.placements, target, strict=True))
        if source != to and isinstance(to, Shard)
    ]
    if not all(shards_are_chunks(axis, target) for axis in scattered):
        return None
    return reduction_to("a tensor", tensor, target)


def _shard_item(
    tensor: DTensor, target: tuple[Placement, ...]
) -> tuple[FlatGroup, ShardItem] | None:
    """Returns the item of a tensor that needs a gather, or another sharded dim; else None."""
    mesh, sources = tensor.device_mesh, tensor.placements
    axes = [axis for axis in range(mesh.ndim) if sources[axis] != target[axis]]
    if not axes or not all(type(sources[axis]) is Shard for axis in axes):
        return None
    unchanged = [None if axis in axes else placement for axis, placement in enumerate(sources)]
    gathers = all(type(target[axis]) is Replicate for axis in axes)
    exchanges = len(axes) == 1 and type(target[axes[0]]) is Shard
    if not (gathers or exchanges):
        return None
    if not all(shards_are_chunks(axis, sources, unchanged) for axis in axes):
        return None
    if exchanges and not shards_are_chunks(axes[0], target):
        return None
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, target)
    item = ShardItem(
        tensor._local_tensor,
        torch.Size(shape),
        tuple((_dim(sources[axis]), mesh.size(axis)) for axis in axes),
        tuple((_dim(target[axis]), mesh.size(axis)) for axis in axes) if exchanges else (),
    )
    return flat_group(mesh, axes), item


def _flat_range_item(
    tensor: DTensor, target: tuple[Placement, ...]
) -> tuple[dist.ProcessGroup, FlatRangeItem] | None:
    """Returns the item if one axis needs other flat ranges of the other axes' shards; else None."""
    mesh, sources = tensor.device_mesh, tensor.placements
    axes = [axis for axis in range(mesh.ndim) if sources[axis] != target[axis]]
    if len(axes) != 1:
        return None
    [axis] = axes
    source, to = sources[axis], target[axis]
    if not (isinstance(source, FlatRangePlacement) and isinstance(to, FlatRangePlacement)):
        return None
    others = tuple(Replicate() if at == axis else source for at, source in enumerate(sources))
    base, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, others)
    ranks = range(mesh.size(axis))
    item = FlatRangeItem(
        tensor._local_tensor.contiguous(),
        tuple(source.interval(base, rank) for rank in ranks),
        tuple(to.interval(base, rank) for rank in ranks),
        to.local_shape(base, mesh.get_local_rank(axis)),
    )
    return mesh.get_group(axis), item


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim
