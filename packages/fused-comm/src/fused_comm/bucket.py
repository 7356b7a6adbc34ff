"""Plans where gradients are placed in the buffers that are reduced: once, without data.

Note: a *route* is the sequence of collectives that gradients have in common: the groups over which
they are scattered and reduced, dtype, device. A *bucket* is a buffer of one route, filled up to a
size:

              slot 0     slot 1          slot 2     flags
    row 0   | a[0:2] - | b[0:3] - - - | c[0:1] -  | a b c first |    to rank 0 of the scatter
    row 1   | a[2:3] - | b[3:6] - - - | c[1:2] -  | a b c first |    to rank 1

It has a *row* for each rank of the scattered groups, or a single row where nothing is scattered. A
gradient's *slot* is the same range of every row, with the slices of the gradient that are that
rank's shard; smaller shards leave the end of the slot unused, and slots are aligned. Behind the
slots is a *flag* for each, 1 on ranks that have the gradient: the sum of the flags says, on ranks
without the gradient, whether any rank has it. The last flag is 1 on ranks that are in the first
round of a step.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fused_comm.narrow_sums import BLOCK, SendDtype, send_dtype_of
from fused_comm.process_groups import FlatGroup, flat_group
from fused_comm.reduction import Reduction
from fused_comm.sharding import Slices, numel, shape_of, shard_slices

__all__ = ["Bucket", "BucketItem", "Route", "Slot", "ViewSpec", "plan_buckets", "route_of"]

_ALIGNMENT = 16  # bytes, of slots, for vectorized kernels


@dataclass(frozen=True)
class RouteStep:
    """One collective of a route.

    Attributes:
        group: of its ranks.
        is_scattered: whether it is a reduce-scatter, rather than an all-reduce.
        sent: the dtype in which terms are sent; None: that of the buffer.
    """

    group: FlatGroup
    is_scattered: bool
    sent: torch.dtype | None

    def __str__(self) -> str:
        kind = "reduce-scatter" if self.is_scattered else "all-reduce"
        sent = "" if self.sent is None else f" in {str(self.sent).removeprefix('torch.')}"
        return f"{kind} over {self.group.size}{sent}"


@dataclass(frozen=True)
class Route:
    """The collectives of a bucket.

    Attributes:
        scattered: the groups of the reduce-scatters, in the order of their axes.
        reduced: the groups of the all-reduces, in the order in which they are issued.
        dtype: of the buffer.
        device: of the buffer.
        averaged: whether the sum is divided by the number of ranks.
        sent: the dtypes in which the terms are sent, of the scattered groups and then of the
            reduced ones; None is that of the buffer, as is an empty tuple for all.
    """

    scattered: tuple[FlatGroup, ...]
    reduced: tuple[FlatGroup, ...]
    dtype: torch.dtype
    device: torch.device
    averaged: bool
    sent: tuple[torch.dtype | None, ...] = ()

    @cached_property
    def steps(self) -> tuple[RouteStep, ...]:
        """The collectives, in the order in which they are issued."""
        groups = (*self.scattered, *self.reduced)
        return tuple(
            RouteStep(group, number < len(self.scattered), send)
            for number, (group, send) in enumerate(
                zip(groups, self.sent or [None] * len(groups), strict=True)
            )
        )

    @cached_property
    def has_blocks(self) -> bool:
        """Whether terms are sent in blocks with a scale, to which all numbers of a block count."""
        return any(send is not None and send.itemsize == 1 for send in self.sent)

    @cached_property
    def alignment(self) -> int:
        """Elements of which the starts of slots are multiples; flags share no gradient's block."""
        return BLOCK if self.has_blocks else max(1, _ALIGNMENT // self.dtype.itemsize)

    @cached_property
    def rows(self) -> int:
        """The number of rows of its buckets."""
        return math.prod(group.size for group in self.scattered)

    @cached_property
    def ranks(self) -> int:
        """The number of terms of the sum."""
        return self.rows * math.prod(group.size for group in self.reduced)

    @cached_property
    def owns_finished(self) -> bool:
        """Whether this rank contributes a finished gradient to another sum, rather than zeros.

        To a sum the first rank alone contributes it; to a mean every rank does.
        """
        return self.averaged or all(group.position == 0 for group in self.reduced)

    @property
    def divisors(self) -> tuple[float, float]:
        """What a buffer is divided by before it is summed, and after.

        A mean of fp16 numbers may be finite where their sum is not: half of the division, by a
        power of two so that nothing is rounded, is made before (as torch/distributed/fsdp does).
        Other dtypes have the range of fp32: they are divided once, before the sum where the divisor
        is a power of two, as the copy into the buffer does it for free.
        """
        if not self.averaged or self.ranks == 1:
            return 1.0, 1.0
        before = float(self.ranks) if self.ranks & (self.ranks - 1) == 0 else 1.0
        if self.dtype == torch.float16:
            before = 2.0 ** math.ceil(math.log2(self.ranks) / 2)
        return before, self.ranks / before

    def __str__(self) -> str:
        parts = map(str, self.steps)
        mean = ", mean" if self.averaged else ""
        return f"{', '.join(parts)}, {str(self.dtype).removeprefix('torch.')}{mean}"

    def positions(self) -> list[int]:
        """Returns the index of each row's shard, row-major over the scattered axes."""
        indices = [0]
        for group in self.scattered:
            indices = [
                index * group.size + position for index in indices for position in group.order
            ]
        return indices

    @property
    def own_row(self) -> int:
        """The row with this rank's shard."""
        own = 0
        for group in self.scattered:
            own = own * group.size + group.position
        return self.positions().index(own)


def route_of(
    reduction: Reduction,
    dtype: torch.dtype,
    averaged: bool,
    fuse_axes: bool = True,
    timeout: datetime.timedelta | None = None,
    send: SendDtype = None,
) -> Route:
    """Returns the route of a DTensor's reduction.

    Makes the groups, so all their ranks have to call.

    Args:
        reduction: of a DTensor.
        dtype: of the sums.
        averaged: whether they are divided by the number of ranks.
        fuse_axes: several axes as one group; False: a group for each.
        timeout: of the groups that are made.
        send: the dtypes in which terms are sent, by axis; axes with different ones are not fused,
            and those that are reduced in the dtype of the sums are reduced first.
    """
    mesh = reduction.mesh
    assert mesh is not None

    names = mesh.mesh_dim_names or (None,) * mesh.ndim

    def sent_along(axis: int) -> torch.dtype | None:
        return send_dtype_of(send, axis, names[axis])

    def groups(axes: Sequence[int]) -> list[tuple[FlatGroup, torch.dtype | None]]:
        together = [[*some] for _, some in itertools.groupby(axes, sent_along)]
        if not fuse_axes:
            together = [[axis] for axis in axes]
        return [(flat_group(mesh, some, timeout), sent_along(some[0])) for some in together]

    scattered = groups([one.axis for one in reduction.scattered])
    reduced = groups(sorted(reduction.reduced, key=lambda axis: str(sent_along(axis) or "")))
    sent = tuple(send for _, send in (*scattered, *reduced))
    return Route(
        tuple(group for group, _ in scattered), tuple(group for group, _ in reduced), dtype,
        reduction.device, averaged, sent if any(sent) else (),
    )  # fmt: skip


@dataclass(frozen=True)
class BucketItem:
    """A gradient or tensor that is to be placed in a bucket.

    Attributes:
        index: its number among the caller's parameters or tensors.
        reduction: what it needs.
        route: of its bucket.
    """

    index: int
    reduction: Reduction
    route: Route


@dataclass(frozen=True)
class ViewSpec:
    """A contiguous view of a flat tensor.

    Attributes:
        start: its first element.
        shape: its sizes.
        stride: its strides, in elements.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view; one call, where a slice and a view are two."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Slot:
    """A gradient's range in every row.

    Attributes:
        item: the gradient.
        start: its first element.
        size: elements of the largest shard.
        flag: the element that says whether there is a gradient.
        parts: per row, a view of the buffer and the slices of the local gradient that are copied
            there; None for all of it.
        own_view: this rank's shard in the row that it receives.
        own_slices: this rank's shard in the local gradient.
    """

    item: BucketItem
    start: int
    size: int
    flag: int
    parts: tuple[tuple[ViewSpec, Slices | None], ...]
    own_view: ViewSpec
    own_slices: Slices


@dataclass(frozen=True)
class Bucket:
    """The plan of one buffer.

    Attributes:
        route: its collectives.
        slots: in the order of use.
        first_flag: the element that says whether any rank is in a step's first round.
        row: elements of a row.
    """

    route: Route
    slots: tuple[Slot, ...]
    first_flag: int
    row: int

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return self.row * self.route.rows

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.route.dtype.itemsize


def plan_buckets(items: Iterable[BucketItem], bucket_bytes: int) -> list[Bucket]:
    """Fills buckets in the order of the items; a larger item has a bucket for itself.

    Args:
        items: in the order in which their gradients are computed.
        bucket_bytes: the most bytes of a bucket, unless it has a single item.

    Returns:
        The buckets, in the order in which they are complete.
    """
    filling: dict[Route, list[BucketItem]] = {}
    used: dict[Route, int] = {}
    complete: list[list[BucketItem]] = []
    for item in items:
        nbytes = item.reduction.shape.numel() * item.route.dtype.itemsize
        waiting = filling.setdefault(item.route, [])
        if waiting and used[item.route] + nbytes > bucket_bytes:
            complete.append(filling.pop(item.route))
            waiting = filling[item.route] = []
        if not waiting:
            used[item.route] = 0
        waiting.append(item)
        used[item.route] += nbytes
    return [_bucket(items) for items in [*complete, *filling.values()]]


def _bucket(items: Sequence[BucketItem]) -> Bucket:
    route = items[0].route
    align = route.alignment
    ranges, end = [], 0
    for item in items:
        shards = _shards(item.reduction, route)
        size = max(numel(shard) for shard in shards)
        ranges.append((end, size, shards))
        end += math.ceil(size / align) * align
    row = end + math.ceil((len(items) + 1) / align) * align
    slots = []
    for number, (item, (start, size, shards)) in enumerate(zip(items, ranges, strict=True)):
        parts = tuple(
            (_view(index * row + start, shard), shard if route.rows > 1 else None)
            for index, shard in enumerate(shards)
        )
        own = shards[route.own_row]
        slots.append(Slot(item, start, size, end + number, parts, _view(start, own), own))
    return Bucket(route, tuple(slots), end + len(slots), row)


def _view(start: int, shard: Slices) -> ViewSpec:
    shape = shape_of(shard)
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return ViewSpec(start, tuple(shape), tuple(stride))


def _shards(reduction: Reduction, route: Route) -> tuple[Slices, ...]:
    """Returns the slices of a local gradient for each row."""
    mesh = reduction.mesh
    splits = [(one.dim, mesh.size(one.axis)) for one in reduction.scattered] if mesh else []
    return tuple(shard_slices(reduction.shape, splits, position) for position in route.positions())
