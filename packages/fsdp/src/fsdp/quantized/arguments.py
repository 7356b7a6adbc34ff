"""Checks of what a ``quantize_fn`` returned for a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from fsdp.mesh import ParamPlacement
from fsdp.quantized.operands import OperandFormat
from fsdp.quantized.tiles import Tiles
from ragged_shard import InterleavedShard, dim_of

__all__ = [
    "check_axes_of_tiles",
    "checked_block",
    "checked_operand",
    "checked_tiles",
    "keeps_blocks",
]


def checked_tiles(
    tiles: object,
    param: torch.Tensor,
    placement: ParamPlacement | None,
    name: str,
    *,
    extension: bool,
) -> Tiles | None:
    """Returns the tiles of a parameter; None if it is not quantized.

    Args:
        tiles: what a ``quantize_fn`` returned.
        param: the original parameter.
        placement: of a DTensor.
        name: of the parameter, for errors.
        extension: whether the parameter has ``fsdp_pre_all_gather``.

    Raises:
        ValueError: these are no `Tiles`; the parameter is no matrix of floats or has
            ``fsdp_pre_all_gather``; other axes of the mesh split tiles.
    """
    if tiles is None:
        return None
    if not isinstance(tiles, Tiles):
        raise ValueError(
            f"fully_shard: quantize_fn: expected Tiles(...), an OperandFormat or None for "
            f"{name!r}, got {tiles!r}"
        )
    if param.ndim < 2 or not param.is_floating_point():
        raise ValueError(
            f"fully_shard: quantize_fn: expected None for {name!r}, a {param.dtype} of "
            f"{tuple(param.shape)}, got {tiles}; only matrices of floats have tiles"
        )
    if extension:
        raise ValueError(
            f"fully_shard: quantize_fn: expected None for {name!r}, a {type(param.data).__name__} "
            f"with fsdp_pre_all_gather, got {tiles}"
        )
    if placement is None:
        return tiles
    check_axes_of_tiles(
        tiles, param, placement.shape, placement.spec.placements, name,
        is_uneven=placement.is_uneven,
    )  # fmt: skip
    return tiles


def checked_operand(
    form: OperandFormat,
    param: torch.Tensor,
    placement: ParamPlacement | None,
    name: str,
    *,
    extension: bool,
) -> OperandFormat:
    """Returns the format of an operand.

    Args:
        form: what a ``quantize_fn`` returned.
        param: the original parameter.
        placement: of a DTensor.
        name: of the parameter, for errors.
        extension: whether the parameter has ``fsdp_pre_all_gather``.

    Raises:
        ValueError: the parameter has no matrices of floats, has ``fsdp_pre_all_gather``, or other
            axes give ranks parts of different sizes.
    """
    found = None
    if param.ndim not in (2, 3) or not param.is_floating_point():
        found = f"a {param.dtype} of {tuple(param.shape)}"
    elif extension:
        found = f"a {type(param.data).__name__} with fsdp_pre_all_gather"
    elif placement is not None and placement.is_uneven:
        found = "of which other axes have parts of different sizes"
    if found is not None:
        raise ValueError(
            f"fully_shard: quantize_fn: expected a matrix of floats, or those of experts, with "
            f"equal parts on other axes for {form}, got {name!r}, {found}; return None for it"
        )
    return form


def check_axes_of_tiles(
    tiles: Tiles,
    param: torch.Tensor,
    shape: Sequence[int],
    placements: Sequence[Placement],
    name: str,
    *,
    is_uneven: bool,
) -> None:
    """Refuses axes that split the tiles of a parameter.

    Args:
        tiles: of the parameter.
        param: the original parameter.
        shape: the largest of the ranks' local tensors.
        placements: of the parameter on axes of other parallelism.
        name: of the parameter, for errors.
        is_uneven: whether these axes give ranks local tensors of different shapes.

    Raises:
        ValueError: naming the parameter, and the sizes that would not split tiles.
    """
    if is_uneven:
        raise ValueError(
            f"fully_shard: quantize_fn: expected None for {name!r} of {tuple(param.shape)}, of "
            f"which other axes have parts of different sizes, got {tiles}; pad it"
        )
    for one in placements:
        dim = dim_of(one)
        if dim is None:
            continue
        size = {param.ndim - 2: tiles.rows, param.ndim - 1: tiles.cols}.get(dim, 1)
        chunks = one.interleaves if isinstance(one, InterleavedShard) else 1
        if shape[dim] % (chunks * size):
            raise ValueError(
                f"fully_shard: {name!r} of {tuple(param.shape)} is sharded by {one} on another "
                f"axis into {tuple(shape)}, which splits its tiles of {tiles.rows} x "
                f"{tiles.cols}; expected a multiple of {chunks * size} there, smaller tiles, or "
                f"None of quantize_fn"
            )


def checked_block(
    form: Tiles | OperandFormat,
    granularity: object,
    block: int,
    shape: tuple[int, ...],
    name: str,
) -> int:
    """Returns the block of a quantized parameter: one or more of the form's.

    Args:
        form: of the parameter.
        granularity: what a ``shard_placement_fn`` returned; None leaves it to the form.
        block: elements of the granularity.
        shape: of this rank's part of the unsharded parameter.
        name: of the parameter, for errors.

    Raises:
        ValueError: the granularity splits the form's blocks.
    """
    of_form = form.block(shape)
    if granularity is None:
        return of_form
    if not keeps_blocks(of_form, block, shape):
        split = f"the rows of {form}"
        if isinstance(form, Tiles):
            split = f"its tiles of {form.rows} x {form.cols}"
        raise ValueError(
            f"fully_shard: shard_placement_fn gave {granularity!r} for {name!r} of {shape}, which "
            f"splits {split}; expected None, Rows({of_form // shape[-1]}), Block({of_form}), a "
            f"multiple of one of these, or Whole()"
        )
    return block


def keeps_blocks(of_form: int, block: int, shape: Sequence[int]) -> bool:
    """Returns whether blocks of a granularity split no block of a form."""
    return not block % of_form or block == max(1, torch.Size(shape).numel())
