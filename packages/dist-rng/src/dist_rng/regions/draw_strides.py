"""The dims and strides with which the compiled walk and the CUDA kernels count a region."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from dist_rng import _core
from dist_rng.regions.region import IndexRange, Region, dense_strides_of


@dataclass(frozen=True)
class DrawDim:
    """One dim of a grid.

    Attributes:
        pieces: the indices that the local tensor holds, none empty.
        draw_stride: distance of neighbours in draw index.
        local_stride: distance of neighbours in the local tensor's storage, in elements; with
            windows, in the grid's row-major order.
    """

    pieces: tuple[IndexRange, ...]
    draw_stride: int
    local_stride: int

    @property
    def size(self) -> int:
        """Number of indices that the local tensor holds."""
        return sum(map(len, self.pieces))


@dataclass(frozen=True)
class DrawStrides:
    """The dims of a grid in the order in which the device counts them, outermost first."""

    dims: tuple[DrawDim, ...]
    windows: tuple[IndexRange, ...] | None

    def grid(self) -> _core.LocalGrid:
        """Returns the compiled walk over these dims."""
        return _core.LocalGrid(
            [[(piece.start, piece.stop) for piece in dim.pieces] for dim in self.dims],
            [dim.draw_stride for dim in self.dims],
            [dim.local_stride for dim in self.dims],
            None if self.windows is None else [(w.start, w.stop) for w in self.windows],
        )


@lru_cache(maxsize=4096)
def require_fit(region: Region, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Checks that a local tensor can hold ``region``: otherwise a fill would write outside of it.

    Args:
        region: what the local tensor is meant to hold.
        shape: the local tensor's.
        strides: the local tensor's, in elements.

    Raises:
        ValueError: it has another shape (with windows: another number of elements, or strides that
            are not contiguous), or its elements overlap.
    """
    numel = prod(shape)
    if numel == region.numel == 0:
        return
    if region.windows is not None:
        dense = dense_strides_of(shape, range(len(shape)))
        contiguous = all(
            size == 1 or stride == expected
            for size, stride, expected in zip(shape, strides, dense, strict=True)
        )
        if numel != region.numel or not contiguous:
            raise ValueError(
                f"a region of {region.numel} elements in windows: expected a contiguous local"
                f" tensor of as many, got shape {tuple(shape)} and strides {strides}"
            )
    elif shape != region.grid_shape:
        raise ValueError(
            f"a region that holds {region.grid_shape} of {region.global_shape}: expected a local"
            f" tensor of shape {region.grid_shape}, got {tuple(shape)}; pass the region of this"
            " tensor"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(
            f"expected a local tensor of distinct elements, got strides {strides}; clone it first"
        )


@lru_cache(maxsize=4096)
def draw_strides(
    region: Region, local_strides: tuple[int, ...], *, logical: bool = False
) -> DrawStrides:
    """Returns the dims of a local tensor with their strides in draws and in the local tensor.

    Args:
        region: what it holds.
        local_strides: its strides, in elements; ignored with windows.
        logical: whether the device counts elements in the order of the dims, not of memory.
    """
    order = range(len(region.global_shape)) if logical else region.memory_order
    of_draws = dense_strides_of(region.global_shape, order)
    if region.windows is not None:
        local_strides = dense_strides_of(region.grid_shape, order)
    dims = tuple(DrawDim(region.pieces[dim], of_draws[dim], local_strides[dim]) for dim in order)
    return DrawStrides(dims, region.windows)
