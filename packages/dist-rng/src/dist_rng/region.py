"""Which elements of a global tensor a local tensor holds.

Note [words of this package]
    region: the global elements that a local tensor holds, and in what order it holds them.
    piece: a run of consecutive indices of one dim that the local tensor holds.
    grid: the elements picked by one list of pieces per dim; the local tensor *is* the grid.
    window: a range of the grid's elements, counted row-major; a ragged shard holds windows
        of a grid instead of the whole of it.
    draw index: an element's place in the order in which one device draws the tensor. It is
        the place in memory, outermost dim first, so a region also knows the global tensor's
        memory order.
    run: consecutive draw indices whose elements lie at a constant stride in the local tensor.

Everything here is arithmetic on Python integers; torch is not needed.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, Self


@dataclass(frozen=True, order=True)
class Piece:
    """The indices ``start <= index < stop``."""

    start: int
    stop: int

    def __len__(self) -> int:
        """Return how many indices the piece holds."""
        return self.stop - self.start


@dataclass(frozen=True)
class Run:
    """Consecutive draws that go to evenly spaced places of the local tensor.

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
            ascending order, or None for the whole grid. The local tensor is then flat, or
            any contiguous shape of as many elements.
    """

    global_shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    memory_order: tuple[int, ...]
    windows: tuple[Piece, ...] | None = None

    def __post_init__(self) -> None:
        """Check that everything lies inside the global tensor.

        Raises:
            ValueError: a piece or a window is out of bounds or out of order, or
                ``memory_order`` is no permutation of the dims.
        """
        dims = len(self.global_shape)
        if len(self.pieces) != dims:
            raise ValueError(
                f"region of a {dims}-dim tensor {self.global_shape} has pieces for"
                f" {len(self.pieces)} dims; give one list of pieces per dim"
            )
        if sorted(self.memory_order) != list(range(dims)):
            raise ValueError(f"memory_order {self.memory_order} is no permutation of {dims} dims")
        for dim, (size, pieces) in enumerate(zip(self.global_shape, self.pieces, strict=True)):
            _check_ascending(pieces, size, f"pieces of dim {dim} of {self.global_shape}")
        if self.windows is not None:
            if self.memory_order != tuple(range(dims)):
                raise ValueError(
                    f"windows need a contiguous global tensor, not memory order {self.memory_order}"
                )
            _check_ascending(self.windows, prod(self.grid_shape), f"windows of {self.grid_shape}")

    @classmethod
    def full(cls, global_shape: Sequence[int]) -> Self:
        """Return the region of a tensor that holds everything: a replica."""
        shape = tuple(map(operator.index, global_shape))
        pieces = tuple(_nonempty(Piece(0, size)) for size in shape)
        return cls(shape, pieces, tuple(range(len(shape))))

    @classmethod
    def box(cls, global_shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Self:
        """Return the region ``global[offset : offset + size, ...]``.

        Args:
            global_shape: shape of the global tensor.
            offsets: first index per dim.
            sizes: number of indices per dim; the local tensor's shape.

        Raises:
            ValueError: the box has another number of dims or does not lie inside the tensor.
        """
        shape = tuple(map(operator.index, global_shape))
        if not len(shape) == len(offsets) == len(sizes):
            raise ValueError(
                f"a box of {shape} needs {len(shape)} offsets and sizes, not {tuple(offsets)}"
                f" and {tuple(sizes)}"
            )
        pieces = tuple(
            _nonempty(Piece(offset, offset + size))
            for offset, size in zip(
                map(operator.index, offsets), map(operator.index, sizes), strict=True
            )
        )
        return cls(shape, pieces, tuple(range(len(shape))))

    @classmethod
    def flat(cls, global_shape: Sequence[int], start: int, stop: int) -> Self:
        """Return the region ``global.flatten()[start:stop]``.

        Raises:
            ValueError: the range does not lie inside the tensor.
        """
        return cls.full(global_shape).within(Piece(operator.index(start), operator.index(stop)))

    @classmethod
    def of(cls, dtensor: Any) -> "Region":
        """Return what this rank's local tensor of a DTensor holds.

        Raises:
            ValueError: a placement is Partial or unknown (see ``register_placement``), or
                the global tensor is not dense.
        """
        from dist_rng.placement import region_of  # here is torch; this module has none

        return region_of(dtensor)

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
        """Return this region of a global tensor with its dims in another order in memory."""
        return replace(self, memory_order=tuple(memory_order))

    def select(self, dim: int, *ranges: Piece) -> Self:
        """Keep parts of one dim, counted in the grid's own indices: what a shard does.

        Args:
            dim: the dim to cut.
            ranges: ascending ranges of ``0 .. grid_shape[dim]``; empty ones are dropped.

        Returns:
            The smaller region. ``select`` after ``select`` is a shard of a shard.

        Raises:
            ValueError: a range is out of bounds, or the region already has windows.
        """
        if self.windows is not None:
            raise ValueError("a region with windows cannot be cut by dim: ragged comes last")
        _check_ascending(ranges, self.grid_shape[dim], f"ranges of dim {dim}")
        kept = tuple(_slice_pieces(self.pieces[dim], ranges))
        return replace(self, pieces=(*self.pieces[:dim], kept, *self.pieces[dim + 1 :]))

    def within(self, *windows: Piece) -> Self:
        """Keep ranges of the elements, counted row-major: what a ragged shard does.

        Raises:
            ValueError: a range is out of bounds, or the global tensor is not contiguous.
        """
        if self.windows is None:
            return replace(self, windows=tuple(w for w in windows if len(w)))
        _check_ascending(windows, self.numel, "windows")
        return replace(self, windows=tuple(_slice_pieces(self.windows, windows)))

    def runs(self, local_strides: Sequence[int] | None = None) -> Iterator[Run]:
        """Yield the local elements as runs of ascending draw index: the reference walk.

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
        draw_strides = _dense_strides(self.global_shape, order)
        *outer, inner = order or (None,)
        if inner is None:
            yield Run(0, 1, 0, 1)
            return
        for draw, local in _walk(self.pieces, outer, draw_strides, strides):
            position = 0
            for piece in self.pieces[inner]:
                start = local + position * strides[inner]
                yield Run(draw + piece.start, len(piece), start, strides[inner])
                position += len(piece)

    def dense_strides(self) -> tuple[int, ...]:
        """Strides, in elements, of a dense local tensor in the global one's memory order."""
        return _dense_strides(self.grid_shape, self.memory_order)

    def _windowed_runs(self) -> Iterator[Run]:
        assert self.windows is not None
        whole = replace(self, windows=None)
        windows, held = list(self.windows), 0
        for run in whole.runs():
            while windows and windows[0].start < run.local + run.count:
                first = max(windows[0].start, run.local)
                last = min(windows[0].stop, run.local + run.count)
                yield Run(run.draw + first - run.local, last - first, held, 1)
                held += last - first
                if windows[0].stop > last:
                    break
                windows.pop(0)


def _walk(
    pieces: Sequence[Sequence[Piece]],
    dims: Sequence[int],
    draw_strides: Sequence[int],
    local_strides: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """Yield (draw offset, local offset) of every combination of indices of ``dims``."""
    if not dims:
        yield 0, 0
        return
    *outer, dim = dims
    for draw, local in _walk(pieces, outer, draw_strides, local_strides):
        indices = (index for piece in pieces[dim] for index in range(piece.start, piece.stop))
        for position, index in enumerate(indices):
            yield draw + index * draw_strides[dim], local + position * local_strides[dim]


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [0] * len(shape)
    stride = 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= shape[dim]
    return tuple(strides)


def _slice_pieces(pieces: Sequence[Piece], ranges: Sequence[Piece]) -> Iterator[Piece]:
    """Cut ``ranges`` of the concatenated pieces, as pieces again; neighbours are joined."""
    cut: list[Piece] = []
    for wanted in ranges:
        position = 0
        for piece in pieces:
            start = max(wanted.start, position) - position + piece.start
            stop = min(wanted.stop, position + len(piece)) - position + piece.start
            if start < stop:
                if cut and cut[-1].stop == start:
                    cut[-1] = Piece(cut[-1].start, stop)
                else:
                    cut.append(Piece(start, stop))
            position += len(piece)
    return iter(cut)


def _nonempty(piece: Piece) -> tuple[Piece, ...]:
    return () if piece.start == piece.stop else (piece,)


def _check_ascending(pieces: Sequence[Piece], size: int, what: str) -> None:
    for piece in pieces:
        if not 0 <= piece.start <= piece.stop <= size:
            raise ValueError(f"{what}: [{piece.start}, {piece.stop}) is not inside [0, {size})")
    for before, after in pairwise(pieces):
        if after.start < before.stop:
            raise ValueError(
                f"{what}: [{after.start}, {after.stop}) does not come after"
                f" [{before.start}, {before.stop})"
            )
