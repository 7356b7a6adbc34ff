"""From a DTensor's placements to the region that this rank holds.

Note [placements of other packages]
    A package that defines a placement says what it holds by calling ``register_placement``,
    or, so that neither package imports the other, by an entry point of the group
    ``dist_rng.placements``: its name is the class's ``module.qualname``, its value a function
    that is given ``register_placement`` and calls it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, Placement, _StridedShard

from dist_rng.region import Piece, Region

RegionFunction = Callable[[Region, Any, int, int], Region]
ENTRY_POINTS = "dist_rng.placements"


@dataclass(frozen=True)
class _Known:
    function: RegionFunction
    last: bool


_known: dict[type[Placement], _Known] = {}


def register_placement(
    placement: type[Placement], function: RegionFunction, *, last: bool = False
) -> None:
    """Say what a placement holds: ``function(region, placement, axis_size, axis_rank)``.

    Args:
        placement: the exact class; subclasses are registered by themselves.
        function: takes the region that the mesh axes before it left to this rank, and
            returns the part that it keeps (see ``Region.select`` and ``Region.within``).
        last: whether it is applied after every other axis, wherever it stands in the mesh;
            so must a placement be that keeps windows.
    """
    _known[placement] = _Known(function, last)
    _region.cache_clear()


def region_of(dtensor: DTensor) -> Region:
    """Return what this rank's local tensor of ``dtensor`` holds; see ``Region.of``."""
    spec = dtensor._spec
    coordinate = spec.mesh.get_coordinate()
    return _region(
        tuple(spec.mesh.shape),
        None if coordinate is None else tuple(coordinate),
        spec.placements,
        tuple(spec.shape),
        tuple(spec.stride),
        # With strided shards the order is in the placements, and the spec has none.
        getattr(spec, "shard_order", None),
    )


@lru_cache(maxsize=4096)  # every parameter of a model, and as many activations
def _region(
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    shard_order: Any,
) -> Region:
    order = memory_order(shape, stride)
    if coordinate is None:  # a rank outside the mesh holds nothing
        nothing = [0] * len(shape)
        return Region.box(shape, nothing, nothing).with_memory_order(order)
    region = Region.full(shape)
    for axis in _in_order(placements, shard_order):
        function = _lookup(placements[axis]).function
        region = function(region, placements[axis], mesh_shape[axis], coordinate[axis])
    return region.with_memory_order(order)


def memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims of a dense tensor from the outermost to the innermost in memory.

    Dims of size one have no say; they stay beside the dim that follows them.

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
                f"a global tensor of shape {shape} and strides {stride} is not dense, and its"
                " draws have no order in memory; make it contiguous first"
            )
        expected *= shape[dim]
    return order


def slice_of(full: Tensor, region: Region) -> Tensor:
    """Return the elements of a whole tensor that ``region`` holds, in the local shape.

    With windows the result is flat.
    """
    for dim, pieces in enumerate(region.pieces):
        parts = [full.narrow(dim, piece.start, len(piece)) for piece in pieces]
        full = parts[0] if len(parts) == 1 else _concatenate(full, parts, dim)
    if region.windows is None:
        return full
    flat = full.reshape(-1)
    return _concatenate(flat, [flat[window.start : window.stop] for window in region.windows], 0)


def _concatenate(full: Tensor, parts: list[Tensor], dim: int) -> Tensor:
    return torch.cat(parts, dim) if parts else full.narrow(dim, 0, 0)


def _effective_stride(shape: tuple[int, ...], stride: tuple[int, ...], dim: int) -> int:
    # A dim of size one may carry any stride: give it that of a contiguous neighbour.
    if shape[dim] != 1:
        return stride[dim]
    later = [stride[d] * shape[d] for d in range(dim + 1, len(shape)) if shape[d] != 1]
    return max(later, default=1)


def _in_order(placements: tuple[Placement, ...], shard_order: Any) -> list[int]:
    """Return the mesh axes in the order in which they cut: theirs, but for dims with their own."""
    order = list(range(len(placements)))
    for entry in shard_order or ():
        for position, axis in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[position] = axis
    return sorted(order, key=lambda axis: _lookup(placements[axis]).last)


def _lookup(placement: Placement) -> _Known:
    kind = type(placement)
    if kind not in _known:
        for entry in entry_points(
            group=ENTRY_POINTS, name=f"{kind.__module__}.{kind.__qualname__}"
        ):
            entry.load()(register_placement)
    if kind not in _known:
        raise ValueError(
            f"dist-rng does not know what placement {placement} holds; call"
            f" dist_rng.register_placement({kind.__qualname__}, function) first"
        )
    return _known[kind]


def _replicate(region: Region, placement: Replicate, axis_size: int, axis_rank: int) -> Region:
    del placement, axis_size, axis_rank
    return region


def _partial(region: Region, placement: Partial, axis_size: int, axis_rank: int) -> Region:
    del region, axis_size, axis_rank
    raise ValueError(
        f"a random tensor cannot have placement {placement}: one device draws whole values, not"
        " summands; redistribute it to Replicate or Shard first"
    )


def _shard(region: Region, placement: Shard, axis_size: int, axis_rank: int) -> Region:
    size = region.grid_shape[placement.dim]
    return region.select(placement.dim, chunk(Piece(0, size), axis_size, axis_rank))


def _strided_shard(region: Region, placement: Any, axis_size: int, axis_rank: int) -> Region:
    size = region.grid_shape[placement.dim]
    factor = int(placement.split_factor)
    outer = [chunk(Piece(0, size), factor, index) for index in range(factor)]
    kept = (chunk(part, axis_size, axis_rank) for part in outer)
    return region.select(placement.dim, *kept)


def chunk(piece: Piece, count: int, index: int) -> Piece:
    """Return part ``index`` of ``count`` as ``torch.chunk`` cuts; late ones may be empty."""
    step = -(-len(piece) // count)
    start = min(piece.start + index * step, piece.stop)
    return Piece(start, min(start + step, piece.stop))


register_placement(Replicate, _replicate)
register_placement(Partial, _partial)
register_placement(Shard, _shard)
register_placement(_StridedShard, _strided_shard)
