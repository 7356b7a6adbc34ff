"""How gradients lie in the buffers that are reduced: planned once, without data.

Note: a *route* is what gradients have in common that go together: the groups that they are
scattered over and reduced over, dtype, device. A *bucket* is a buffer of one route, filled up to a
size. It has a *row* for each rank of the scattered groups, one in all where nothing is scattered; a
gradient's *slot* is the same range of every row, with the *piece* of the gradient that is that
rank's. Behind the slots stands a *flag* for each, 1 on the ranks that have the gradient: their sum
tells those that have none whether anybody has.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fused_comm.axes import FlatGroup, flat_group
from fused_comm.pieces import Piece, numel, piece_at, shape_of
from fused_comm.reduction import Reduction

__all__ = ["Bucket", "Entry", "Route", "Slot", "plan_buckets", "route_of"]

_ALIGNMENT = 16  # bytes, of slots: what vectorised kernels want


@dataclass(frozen=True)
class Route:
    """Where gradients go together.

    Attributes:
        scattered: the groups of the reduce-scatters, in the order of their axes.
        reduced: the groups of the all-reduces, in the order in which they are made.
        dtype: of the buffer.
        device: of the buffer.
        averaged: whether the sum is divided by the number of ranks.
    """

    scattered: tuple[FlatGroup, ...]
    reduced: tuple[FlatGroup, ...]
    dtype: torch.dtype
    device: torch.device
    averaged: bool

    @cached_property
    def rows(self) -> int:
        """Rows of its buckets."""
        return math.prod(group.size for group in self.scattered)

    @cached_property
    def ranks(self) -> int:
        """How many parts the sum has."""
        return self.rows * math.prod(group.size for group in self.reduced)

    @cached_property
    def keeps_finished(self) -> bool:
        """Whether this rank's part of what is reduced already is all of it, rather than nothing.

        Of a sum the first rank has all; of a mean every rank has what all have.
        """
        return self.averaged or all(group.position == 0 for group in self.reduced)

    def __str__(self) -> str:
        parts = [f"reduce-scatter over {group.size}" for group in self.scattered]
        parts += [f"all-reduce over {group.size}" for group in self.reduced]
        mean = ", mean" if self.averaged else ""
        return f"{', '.join(parts)}, {str(self.dtype).removeprefix('torch.')}{mean}"

    def positions(self) -> list[int]:
        """For each row the number of its shard, row-major over the scattered axes."""
        numbers = [0]
        for group in self.scattered:
            numbers = [number * group.size + place for number in numbers for place in group.order]
        return numbers

    @property
    def own_row(self) -> int:
        """The row whose shard is this rank's."""
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
) -> Route:
    """The route of a DTensor's reduction; makes its groups, so all their ranks have to call.

    Args:
        reduction: what is to be done, on a mesh.
        dtype: of the sums.
        averaged: whether they are divided by the number of ranks.
        fuse_axes: several axes as one group; False: a group for each.
        timeout: of the groups that are made.
    """
    mesh = reduction.mesh
    assert mesh is not None

    def groups(axes: Sequence[int]) -> tuple[FlatGroup, ...]:
        together = [axes] if fuse_axes else [[axis] for axis in axes]
        return tuple(flat_group(mesh, some, timeout) for some in together if some)

    scattered = groups([one.axis for one in reduction.scattered])
    return Route(scattered, groups(reduction.reduced), dtype, reduction.device, averaged)


@dataclass(frozen=True)
class Entry:
    """A parameter that takes part.

    Attributes:
        index: its number among the reducer's parameters.
        reduction: what its gradient needs.
        route: where it goes.
    """

    index: int
    reduction: Reduction
    route: Route


@dataclass(frozen=True)
class Place:
    """A contiguous tensor's place in a flat one.

    Attributes:
        start: its first element.
        shape: its sizes.
        stride: its strides, in elements.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view: in one call, where a slice and a view are two."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.start)


@dataclass(frozen=True)
class Slot:
    """A gradient's range in every row.

    Attributes:
        entry: whose.
        start: its first element.
        size: elements of the largest piece.
        flag: the element that says whether there is a gradient.
        parts: per row, where in the buffer which slices of the local gradient go; None is all of
            it. Of uneven shards the smaller ones leave the end of the slot unused.
        own_place: where this rank's piece is in the row that comes to it.
        own_piece: which slices of the local gradient that is.
    """

    entry: Entry
    start: int
    size: int
    flag: int
    parts: tuple[tuple[Place, Piece | None], ...]
    own_place: Place
    own_piece: Piece


@dataclass(frozen=True)
class Bucket:
    """One buffer.

    Attributes:
        route: where it goes.
        slots: what is in it, in the order of use.
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


def plan_buckets(entries: Iterable[Entry], bucket_bytes: int) -> list[Bucket]:
    """Fills buckets in the order of the entries; a gradient that is larger has one of its own.

    Args:
        entries: in the order in which their gradients come.
        bucket_bytes: what a bucket holds at most, unless it is a single gradient.

    Returns:
        the buckets, in the order in which they are complete.
    """
    filling: dict[Route, list[Entry]] = {}
    used: dict[Route, int] = {}
    complete: list[list[Entry]] = []
    for entry in entries:
        nbytes = entry.reduction.shape.numel() * entry.route.dtype.itemsize
        waiting = filling.setdefault(entry.route, [])
        if waiting and used[entry.route] + nbytes > bucket_bytes:
            complete.append(filling.pop(entry.route))
            waiting = filling[entry.route] = []
        if not waiting:
            used[entry.route] = 0
        waiting.append(entry)
        used[entry.route] += nbytes
    return [_bucket(entries) for entries in [*complete, *filling.values()]]


def _bucket(entries: Sequence[Entry]) -> Bucket:
    route = entries[0].route
    align = max(1, _ALIGNMENT // route.dtype.itemsize)
    places, end = [], 0
    for entry in entries:
        pieces = _pieces(entry.reduction, route)
        size = max(numel(piece) for piece in pieces)
        places.append((end, size, pieces))
        end += math.ceil(size / align) * align
    row = end + math.ceil((len(entries) + 1) / align) * align
    slots = []
    for number, (entry, (start, size, pieces)) in enumerate(zip(entries, places, strict=True)):
        parts = tuple(
            (_place(index * row + start, piece), piece if route.rows > 1 else None)
            for index, piece in enumerate(pieces)
        )
        own = pieces[route.own_row]
        slots.append(Slot(entry, start, size, end + number, parts, _place(start, own), own))
    return Bucket(route, tuple(slots), end + len(slots), row)


def _place(start: int, piece: Piece) -> Place:
    shape = shape_of(piece)
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return Place(start, tuple(shape), tuple(stride))


def _pieces(reduction: Reduction, route: Route) -> tuple[Piece, ...]:
    """Per row, the slices of a local gradient."""
    mesh = reduction.mesh
    cuts = [(one.dim, mesh.size(one.axis)) for one in reduction.scattered] if mesh else []
    return tuple(piece_at(reduction.shape, cuts, position) for position in route.positions())
