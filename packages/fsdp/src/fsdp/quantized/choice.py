"""What a ``quantize_fn`` chose for a parameter, and whether that can be."""

from __future__ import annotations

import torch

from fsdp.extension import is_extension
from fsdp.inner import Placed
from fsdp.quantized.tiles import Tiles
from ragged_shard import InterleavedShard, dim_of

__all__ = ["checked_block", "checked_tiles"]


def checked_tiles(
    chosen: object, param: torch.Tensor, placed: Placed | None, name: str
) -> Tiles | None:
    """The tiles of a parameter, None if it is not quantised.

    Args:
        chosen: what a ``quantize_fn`` returned.
        param: as it was given.
        placed: how it lies if it is a DTensor.
        name: of the parameter, for errors.

    Raises:
        ValueError: no `Tiles`, no matrix of floats, a tensor that gathers itself, or one whose
            tiles other axes of the mesh cut.
    """
    if chosen is None:
        return None
    if not isinstance(chosen, Tiles):
        raise ValueError(
            f"fully_shard: quantize_fn gave {chosen!r} for {name!r}; wants Tiles(...) or None"
        )
    if param.ndim < 2 or not param.is_floating_point():
        raise ValueError(
            f"fully_shard: quantize_fn gave {chosen} for {name!r}, a {param.dtype} of "
            f"{tuple(param.shape)}; wants None there, only matrices of floats have tiles"
        )
    if is_extension(param, name):
        raise ValueError(
            f"fully_shard: quantize_fn gave {chosen} for {name!r}, a {type(param.data).__name__} "
            f"that says itself what is gathered of it; wants None there"
        )
    if placed is None:
        return chosen
    for placement in placed.spec.placements:
        dim = dim_of(placement)
        if dim is None:
            continue
        size = {param.ndim - 2: chosen.rows, param.ndim - 1: chosen.cols}.get(dim, 1)
        chunks = placement.interleaves if isinstance(placement, InterleavedShard) else 1
        if placed.shape[dim] % (chunks * size):
            raise ValueError(
                f"fully_shard: {name!r} of {tuple(param.shape)} is cut by {placement} on another "
                f"axis into {tuple(placed.shape)}, through its tiles of {chosen.rows} x "
                f"{chosen.cols}; wants a multiple of {chunks * size} there, smaller tiles, or None "
                f"of quantize_fn"
            )
    return chosen


def checked_block(
    tiles: Tiles, granularity: object, block: int, shape: tuple[int, ...], name: str
) -> int:
    """The block of a quantised parameter: some of its strips.

    Args:
        tiles: of the parameter.
        granularity: what a ``shard_placement_fn`` returned; None leaves it to the tiles.
        block: elements that the granularity means.
        shape: of what this rank has of the unsharded parameter.
        name: of the parameter, for errors.

    Raises:
        ValueError: the granularity cuts tiles.
    """
    wanted, numel = tiles.block(shape), max(1, torch.Size(shape).numel())
    if granularity is None:
        return wanted
    if block % wanted and block != numel:
        rows = wanted // shape[-1]
        raise ValueError(
            f"fully_shard: shard_placement_fn gave {granularity!r} for {name!r} of {shape}, which "
            f"cuts its tiles of {tiles.rows} x {tiles.cols}; wants None, Rows({rows}), "
            f"Block({wanted}), a multiple of one of these, or Whole()"
        )
    return block
