"""From a region to the dims that the compiled walks and the CUDA kernels count."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from dist_rng.region import Piece, Region

if TYPE_CHECKING:
    from dist_rng._core import Grid


@dataclass(frozen=True)
class LayoutDim:
    """One dim of a grid.

    Attributes:
        pieces: the indices that the local tensor holds, none empty.
        draw_stride: distance of neighbours in draw index.
        local_stride: distance of neighbours in the local tensor's storage, in elements; with
            windows, in the grid's row-major order.
    """

    pieces: tuple[Piece, ...]
    draw_stride: int
    local_stride: int

    @property
    def size(self) -> int:
        """Indices held."""
        return sum(map(len, self.pieces))


@dataclass(frozen=True)
class Layout:
    """The dims of a grid in the order in which the device counts them, outermost first."""

    dims: tuple[LayoutDim, ...]
    windows: tuple[Piece, ...] | None

    def grid(self) -> "Grid":
        """Return the compiled walk over these dims."""
        from dist_rng._core import Grid

        return Grid(
            [[(piece.start, piece.stop) for piece in dim.pieces] for dim in self.dims],
            [dim.draw_stride for dim in self.dims],
            [dim.local_stride for dim in self.dims],
            None if self.windows is None else [(w.start, w.stop) for w in self.windows],
        )


@lru_cache(maxsize=4096)
def require_fit(region: Region, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse a local tensor that is not what ``region`` says: a fill would write elsewhere.

    Args:
        region: what the local tensor is said to hold.
        shape: the local tensor's.
        strides: the local tensor's, in elements.

    Raises:
        ValueError: it has another shape, with windows also another number of elements or strides
            that are not contiguous, or its elements overlap.
    """
    numel = prod(shape)
    if numel == region.numel == 0:
        return
    if region.windows is not None:
        dense = _dense_strides(shape, range(len(shape)))
        contiguous = all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(shape, strides, dense, strict=True)
        )
        if numel != region.numel or not contiguous:
            raise ValueError(
                f"a region of {region.numel} elements in windows needs a contiguous local tensor"
                f" of as many, not one of shape {tuple(shape)} and strides {strides}"
            )
    elif shape != region.grid_shape:
        raise ValueError(
            f"the region holds {region.grid_shape} of {region.global_shape}, the local tensor has"
            f" shape {tuple(shape)}; give the region of this very tensor"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"a local tensor with strides {strides} is expanded: clone it first")


@lru_cache(maxsize=4096)
def layout_of(region: Region, local_strides: tuple[int, ...], *, logical: bool = False) -> Layout:
    """Return how a local tensor lies in the draws.

    Args:
        region: what it holds.
        local_strides: its strides, in elements; of no meaning with windows.
        logical: whether the device counts elements in the order of the dims, not of memory.
    """
    order = range(len(region.global_shape)) if logical else region.memory_order
    draw_strides = _dense_strides(region.global_shape, order)
    if region.windows is not None:
        local_strides = _dense_strides(region.grid_shape, order)
    dims = tuple(
        LayoutDim(region.pieces[dim], draw_strides[dim], local_strides[dim]) for dim in order
    )
    return Layout(dims, region.windows)


def _dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [0] * len(shape)
    stride = 1
    for dim in reversed(order):
        strides[dim] = stride
        stride *= shape[dim]
    return tuple(strides)
