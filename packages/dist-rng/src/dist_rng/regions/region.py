"""Which elements of a global tensor a local tensor holds.

Note [terminology]
    region: the global elements that a local tensor holds, and the order in which it holds them.
    piece: a range of consecutive indices of one dim that the local tensor holds.
    grid: the elements selected by one list of pieces per dim. Without windows the local tensor
        is the grid.
    window: a range of the grid's elements, counted row-major; a ragged shard holds windows of a
        grid instead of the whole grid.
    draw index: an element's position in the order in which one device draws the tensor. It is
        the position in memory, outermost dim first, so a region also records the memory order of
        the global tensor.
    run: consecutive draw indices whose elements have a constant stride in the local tensor.

This module is arithmetic on Python integers and does not import torch.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, Self

from dist_rng.regions.registry import RegisteredPlacement, registered_placement


@dataclass(frozen=True, order=True)
class IndexRange:
    """The indices ``start <= index < stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        """Returns the number of indices."""
        return self.stop - self.start


@dataclass(frozen=True)
class DrawRun:
    """Consecutive draws whose elements are evenly spaced in the local tensor.

    Attributes:
        draw: draw index of the first element.
        count: number of elements.
        local: offset of the first element in the local tensor's storage, in elements.
        stride: distance of neighbours in the local tensor's storage, in elements.
    """

    draw: int
    count: int
    local: int
    stride: int


@dataclass(frozen=True)
class Region:
    """The elements of a global tensor that one local tensor holds.

    Attributes:
        global_shape: shape of the global tensor.
        pieces: per dim, the pieces that the grid holds, in ascending order.
        memory_order: the global tensor's dims from the outermost to the innermost in memory;
            ``(0, 1, ..)`` for a contiguous tensor.
        windows: ranges of the grid's row-major elements that the local tensor holds, in
            ascending order, or None for the whole grid. With windows the local tensor is flat,
            or of any contiguous shape of as many elements.
    """

    global_shape: tuple[int, ...]
    pieces: tuple[tuple[IndexRange, ...], ...]
    memory_order: tuple[int, ...]
    windows: tuple[IndexRange, ...] | None = None

    def __post_init__(self) -> None:
        """Checks that all pieces and windows are inside the global tensor.

        Raises:
            ValueError: a piece or a window is out of bounds or out of order, or
                ``memory_order`` is not a permutation of the dims.
        """
        dims = len(self.global_shape)
        if len(self.pieces) != dims:
            raise ValueError(
                f"expected one list of pieces for each of the {dims} dims of {self.global_shape},"
                f" got {len(self.pieces)}"
            )
        if sorted(self.memory_order) != list(range(dims)):
            raise ValueError(
                f"expected memory_order to be a permutation of {dims} dims, got {self.memory_order}"
            )
        for dim, (size, pieces) in enumerate(zip(self.global_shape, self.pieces, strict=True)):
            _check_ascending(pieces, size, f"pieces of dim {dim} of {self.global_shape}")
        if self.windows is not None:
            if self.memory_order != tuple(range(dims)):
                raise ValueError(
                    "windows: expected a contiguous global tensor, got memory order"
                    f" {self.memory_order}"
                )
            _check_ascending(self.windows, prod(self.grid_shape), f"windows of {self.grid_shape}")

    @classmethod
    def full(cls, global_shape: Sequence[int]) -> Self:
        """Returns the region of a replica, which holds every element."""
        shape = tuple(map(operator.index, global_shape))
        pieces = tuple(_nonempty(IndexRange(0, size)) for size in shape)
        return cls(shape, pieces, tuple(range(len(shape))))

    @classmethod
    def box(cls, global_shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Self:
        """Returns the region ``global[offset : offset + size, ...]``.

        Args:
            global_shape: shape of the global tensor.
            offsets: first index per dim.
            sizes: number of indices per dim; the local tensor's shape.

        Raises:
            ValueError: the box has another number of dims or is not inside the tensor.
        """
        shape = tuple(map(operator.index, global_shape))
        if not len(shape) == len(offsets) == len(sizes):
            raise ValueError(
                f"a box of {shape}: expected {len(shape)} offsets and sizes, got"
                f" {tuple(offsets)} and {tuple(sizes)}"
            )
        pieces = tuple(
            _nonempty(IndexRange(offset, offset + size))
            for offset, size in zip(
                map(operator.index, offsets), map(operator.index, sizes), strict=True
            )
        )
        return cls(shape, pieces, tuple(range(len(shape))))

    @classmethod
    def flat(cls, global_shape: Sequence[int], start: int, stop: int) -> Self:
        """Returns the region ``global.flatten()[start:stop]``.

        Raises:
            ValueError: the range is not inside the tensor.
        """
        return cls.full(global_shape).within(
            IndexRange(operator.index(start), operator.index(stop))
        )

    @classmethod
    def of(cls, dtensor: Any) -> "Region":
        """Returns the region of this rank's local tensor of a DTensor.

        Raises:
            ValueError: a placement is Partial or not registered (see ``register_placement``), or
                the global tensor is not dense.
        """
        spec = dtensor._spec
        coordinate = spec.mesh.get_coordinate()
        shape, stride = tuple(spec.shape), tuple(spec.stride)
        if coordinate is None:  # a rank outside the mesh holds nothing
            nothing = [0] * len(shape)
            empty = Region.box(shape, nothing, nothing)
            return empty.with_memory_order(memory_order(shape, stride))
        return _region_of_rank(
            tuple(spec.mesh.shape),
            tuple(coordinate),
            spec.placements,
            tuple(registered_placement(placement) for placement in spec.placements),
            shape,
            stride,
            # With strided shards the order is in the placements, and the spec has none.
            getattr(spec, "shard_order", None),
        )

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Shape of the grid; the local tensor's shape where there are no windows."""
        return tuple(sum(map(len, pieces)) for pieces in self.pieces)

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        if self.windows is not None:
            return sum(map(len, self.windows))
        return prod(self.grid_shape)

    @property
    def global_numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.global_shape)

    def with_memory_order(self, memory_order: Sequence[int]) -> Self:
        """Returns the same region of a global tensor whose dims have another order in memory."""
        return replace(self, memory_order=tuple(memory_order))

    def select(self, dim: int, *ranges: IndexRange) -> Self:
        """Selects ranges of one dim, counted in the grid's indices, as a shard does.

        Args:
            dim: the dim to shard.
            ranges: ascending ranges of ``0 .. grid_shape[dim]``; empty ones are dropped.

        Returns:
            The smaller region. ``select`` after ``select`` is a shard of a shard.

        Raises:
            ValueError: a range is out of bounds, or the region already has windows.
        """
        if self.windows is not None:
            raise ValueError(
                "select: expected a region without windows; apply ragged placements last"
            )
        _check_ascending(ranges, self.grid_shape[dim], f"ranges of dim {dim}")
        selected = tuple(_slice_pieces(self.pieces[dim], ranges))
        return replace(self, pieces=(*self.pieces[:dim], selected, *self.pieces[dim + 1 :]))

    def within(self, *windows: IndexRange) -> Self:
        """Selects ranges of the elements, counted row-major, as a ragged shard does.

        Raises:
            ValueError: a range is out of bounds, or the global tensor is not contiguous.
        """
        if self.windows is None:
            return replace(self, windows=tuple(w for w in windows if len(w)))
        _check_ascending(windows, self.numel, "windows")
        return replace(self, windows=tuple(_slice_pieces(self.windows, windows)))

    def runs(self, local_strides: Sequence[int] | None = None) -> Iterator[DrawRun]:
        """Yields the local elements as runs of ascending draw index.

        This is the reference of the compiled walk in ``src/cpp/local_grid.h``.

        Args:
            local_strides: the local tensor's strides in elements; by default those of a
                dense local tensor in the same memory order. Ignored with windows, whose
                local tensor is contiguous.
        """
        if self.numel == 0:
            return
        if self.windows is not None:
            yield from self._windowed_runs()
            return
        order = self.memory_order
        strides = self.dense_strides() if local_strides is None else tuple(local_strides)
        draw_strides = dense_strides_of(self.global_shape, order)
        *outer, inner = order or (None,)
        if inner is None:
            yield DrawRun(0, 1, 0, 1)
            return
        for draw, local in _walk(self.pieces, outer, draw_strides, strides):
            position = 0
            for piece in self.pieces[inner]:
                start = local + position * strides[inner]
                yield DrawRun(draw + piece.start, len(piece), start, strides[inner])
                position += len(piece)

    def dense_strides(self) -> tuple[int, ...]:
        """Returns the strides, in elements, of a dense local tensor in this memory order."""
        return dense_strides_of(self.grid_shape, self.memory_order)

    def _windowed_runs(self) -> Iterator[DrawRun]:
        assert self.windows is not None
        grid = replace(self, windows=None)
        windows, local = list(self.windows), 0
        for run in grid.runs():
            while windows and windows[0].start < run.local + run.count:
                first = max(windows[0].start, run.local)
                last = min(windows[0].stop, run.local + run.count)
                yield DrawRun(run.draw + first - run.local, last - first, local, 1)
                local += last - first
                if windows[0].stop > last:
                    break
                windows.pop(0)


def _walk(
    pieces: Sequence[Sequence[IndexRange]],
    dims: Sequence[int],
    draw_strides: Sequence[int],
    local_strides: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """Yields (draw offset, local offset) of every combination of indices of ``dims``."""
    if not dims:
        yield 0, 0
        return
    *outer, dim = dims
    for draw, local in _walk(pieces, outer, draw_strides, local_strides):
        indices = (index for piece in pieces[dim] for index in range(piece.start, piece.stop))
        for position, index in enumerate(indices):
            yield draw + index * draw_strides[dim], local + position * local_strides[dim]


def dense_strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a dense tensor with dims in this ``order``, outermost first."""
    strides = [0] * len(shape)
    stride = 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= shape[dim]
    return tuple(strides)


def _slice_pieces(
    pieces: Sequence[IndexRange], ranges: Sequence[IndexRange]
) -> Iterator[IndexRange]:
    """Returns ``ranges`` of the concatenated pieces as pieces; adjacent ones are joined."""
    sliced: list[IndexRange] = []
    for selected in ranges:
        position = 0
        for piece in pieces:
            start = max(selected.start, position) - position + piece.start
            stop = min(selected.stop, position + len(piece)) - position + piece.start
            if start < stop:
                if sliced and sliced[-1].stop == start:
                    sliced[-1] = IndexRange(sliced[-1].start, stop)
                else:
                    sliced.append(IndexRange(start, stop))
            position += len(piece)
    return iter(sliced)


def _nonempty(piece: IndexRange) -> tuple[IndexRange, ...]:
    return () if piece.start == piece.stop else (piece,)


def _check_ascending(pieces: Sequence[IndexRange], size: int, what: str) -> None:
    for piece in pieces:
        if not 0 <= piece.start <= piece.stop <= size:
            raise ValueError(
                f"{what}: expected ranges inside [0, {size}), got [{piece.start}, {piece.stop})"
            )
    for before, after in pairwise(pieces):
        if after.start < before.stop:
            raise ValueError(
                f"{what}: expected ascending ranges, got [{after.start}, {after.stop}) after"
                f" [{before.start}, {before.stop})"
            )


@lru_cache(maxsize=4096)  # every parameter of a model, and as many activations
def _region_of_rank(
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Any, ...],
    registered: tuple[RegisteredPlacement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    shard_order: Any,
) -> Region:
    order = memory_order(shape, stride)
    region = Region.full(shape)
    for axis in _axes_in_order(registered, shard_order):
        function = registered[axis].function
        region = function(region, placements[axis], mesh_shape[axis], coordinate[axis])
    return region.with_memory_order(order)


def _axes_in_order(registered: tuple[RegisteredPlacement, ...], shard_order: Any) -> list[int]:
    """Returns the mesh axes in the order in which they shard.

    That is their own order, except for dims whose order the spec gives and for ``last``.
    """
    order = list(range(len(registered)))
    for entry in shard_order or ():
        for position, axis in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[position] = axis
    return sorted(order, key=lambda axis: registered[axis].last)


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dims of a dense tensor from the outermost to the innermost in memory.

    The strides of dims of size one are ignored: such a dim comes before the dim that follows it.

    Raises:
        ValueError: the tensor is not dense: elements overlap, or memory between them is unused.
    """
    dims = tuple(range(len(shape)))
    if 0 in shape:
        return dims
    order = tuple(sorted(dims, key=lambda dim: (-_effective_stride(shape, stride, dim), dim)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != expected:
            raise ValueError(
                f"expected a dense global tensor, got shape {shape} and strides {stride}, whose"
                " draws have no order in memory; make it contiguous first"
            )
        expected *= shape[dim]
    return order


def _effective_stride(shape: tuple[int, ...], stride: tuple[int, ...], dim: int) -> int:
    # A dim of size one may carry any stride: give it that of a contiguous neighbour.
    if shape[dim] != 1:
        return stride[dim]
    later = [stride[d] * shape[d] for d in range(dim + 1, len(shape)) if shape[d] != 1]
    return max(later, default=1)
