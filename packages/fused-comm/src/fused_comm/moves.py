"""Which collective each of many redistributions needs, and those that share one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from fused_comm import _compat
from fused_comm.axes import FlatGroup, flat_group
from fused_comm.bucket import Entry, plan_buckets, route_of
from fused_comm.exchange import Exchange, Item
from fused_comm.flight import Flight
from fused_comm.pack import own_piece
from fused_comm.reduction import Reduction, is_local_cut, reduction_to
from fused_comm.runs import HoldsRuns, RunExchange, RunItem

__all__ = ["Moves"]

_NO_LIMIT = 1 << 62


class Moves:
    """Redistributions that are started together.

    Args:
        tensors: the DTensors.
        targets: the placements of each.
    """

    def __init__(
        self, tensors: Sequence[DTensor], targets: Sequence[tuple[Placement, ...]]
    ) -> None:
        self._tensors, self._targets = tensors, targets
        self._flights: list[Flight] = []
        self._exchanges: list[tuple[Exchange | RunExchange, list[int]]] = []
        self._alone: list[int] = []
        entries: list[Entry] = []
        exchanged: dict[tuple[FlatGroup, bool, torch.dtype], list[tuple[int, Item]]] = {}
        given_out: dict[tuple[dist.ProcessGroup, torch.dtype], list[tuple[int, RunItem]]] = {}
        for number, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if (reduction := _reduction(tensor, target)) is not None:
                route = route_of(reduction, reduction.dtype, reduction.averaged)
                entries.append(Entry(number, reduction, route))
            elif (found := _item(tensor, target)) is not None:
                group, item = found
                key = (group, bool(item.cut), item.local.dtype)
                exchanged.setdefault(key, []).append((number, item))
            elif (run := _run_item(tensor, target)) is not None:
                processes, runs = run
                given_out.setdefault((processes, runs.local.dtype), []).append((number, runs))
            else:
                self._alone.append(number)
        self._start(entries, exchanged)
        for (processes, _), moved in given_out.items():
            sent = RunExchange([item for _, item in moved], processes)
            self._exchanges.append((sent, [number for number, _ in moved]))

    def land(self) -> list[DTensor]:
        """Waits for all of them: the results, outside autograd."""
        results: dict[int, DTensor] = {}
        with torch.no_grad():
            for number in self._alone:
                results[number] = self._tensors[number].redistribute(
                    placements=self._targets[number]
                )
        for flight in self._flights:
            row = flight.land()
            for slot in flight.bucket.slots:
                results[slot.entry.index] = self._placed(slot.entry.index, own_piece(slot, row))
        for exchange, numbers in self._exchanges:
            for number, local in zip(numbers, exchange.land(), strict=True):
                results[number] = self._placed(number, local)
        return [results[number] for number in range(len(self._tensors))]

    def _start(
        self,
        entries: Sequence[Entry],
        exchanged: dict[tuple[FlatGroup, bool, torch.dtype], list[tuple[int, Item]]],
    ) -> None:
        for bucket in plan_buckets(entries, _NO_LIMIT):
            names = [f"tensor {slot.entry.index}" for slot in bucket.slots]
            buffer = torch.empty(bucket.numel, dtype=bucket.route.dtype, device=bucket.route.device)
            flight = Flight(bucket, names, buffer)
            flight.launch(
                {s.entry.index: self._tensors[s.entry.index]._local_tensor for s in bucket.slots}
            )
            self._flights.append(flight)
        for (group, _, _), items in exchanged.items():
            exchange = Exchange([item for _, item in items], group)
            self._exchanges.append((exchange, [number for number, _ in items]))

    def _placed(self, number: int, local: torch.Tensor) -> DTensor:
        tensor = self._tensors[number]
        return _compat.dtensor(local, tensor, tensor.device_mesh, self._targets[number])


def _reduction(tensor: DTensor, target: tuple[Placement, ...]) -> Reduction | None:
    """If all that it needs is to be summed."""
    changed = [(a, b) for a, b in zip(tensor.placements, target, strict=True) if a != b]
    operations = {one.reduce_op for one, _ in changed if isinstance(one, Partial)}
    sums = all(isinstance(a, Partial) and type(b) in (Replicate, Shard) for a, b in changed)
    if not changed or not sums or operations not in ({"sum"}, {"avg"}):
        return None
    cut = [axis for axis, (a, b) in enumerate(zip(tensor.placements, target, strict=True))
           if a != b and isinstance(b, Shard)]  # fmt: skip
    if not all(is_local_cut(axis, target) for axis in cut):
        return None
    return reduction_to("a tensor", tensor, target)


def _item(tensor: DTensor, target: tuple[Placement, ...]) -> tuple[FlatGroup, Item] | None:
    """If all that it needs is to be gathered, or one axis sharded on another dim."""
    mesh, sources = tensor.device_mesh, tensor.placements
    axes = [axis for axis in range(mesh.ndim) if sources[axis] != target[axis]]
    if not axes or not all(type(sources[axis]) is Shard for axis in axes):
        return None
    after = [None if axis in axes else placement for axis, placement in enumerate(sources)]
    gathers = all(type(target[axis]) is Replicate for axis in axes)
    exchanges = len(axes) == 1 and type(target[axes[0]]) is Shard
    if not (gathers or exchanges) or not all(is_local_cut(a, sources, after) for a in axes):
        return None
    if exchanges and not is_local_cut(axes[0], target):
        return None
    shape, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, target)
    item = Item(
        tensor._local_tensor,
        torch.Size(shape),
        tuple((_dim(sources[axis]), mesh.size(axis)) for axis in axes),
        tuple((_dim(target[axis]), mesh.size(axis)) for axis in axes) if exchanges else (),
    )
    return flat_group(mesh, axes), item


def _run_item(
    tensor: DTensor, target: tuple[Placement, ...]
) -> tuple[dist.ProcessGroup, RunItem] | None:
    """If all that it needs is that one axis gives out other runs of what the others leave."""
    mesh, sources = tensor.device_mesh, tensor.placements
    axes = [axis for axis in range(mesh.ndim) if sources[axis] != target[axis]]
    if len(axes) != 1:
        return None
    [axis] = axes
    source, wanted = sources[axis], target[axis]
    if not (isinstance(source, HoldsRuns) and isinstance(wanted, HoldsRuns)):
        return None
    others = tuple(Replicate() if at == axis else one for at, one in enumerate(sources))
    base, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, others)
    ranks = range(mesh.size(axis))
    item = RunItem(
        tensor._local_tensor.contiguous(),
        tuple(source.interval(base, rank) for rank in ranks),
        tuple(wanted.interval(base, rank) for rank in ranks),
        wanted.local_shape(base, mesh.get_local_rank(axis)),
    )
    return mesh.get_group(axis), item


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard)
    return placement.dim
