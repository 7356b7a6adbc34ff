"""Where the blocks of a parameter lie: on whole ranks, or cut, and then where to move them.

Note: blocks are counted from the start of what a rank would hold if the *cut axis* replicated: that
with a RaggedShard, or the only one with a Shard(0). Without tensor parallelism that is the whole
parameter in the order of its storage, so that blocks do not depend on the number of ranks. Where
other axes shard too, it is the local tensor of those axes, and blocks depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp.optim.adam8bit.quantize import blocks_of
from ragged_shard import RaggedShard, StridedRaggedShard, even_shape

__all__ = ["BlockLayout", "block_layout"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class BlockLayout:
    """How the state of a parameter lies.

    Attributes:
        mesh: of the parameter; None of a plain tensor.
        moments: placements of the codes: the parameter's, if no block is cut.
        scale_shape: (blocks,); with tensor parallelism (pieces, blocks of each).
        scales: placements of the scales.
        cut: an element at which the parameter's placements cut a block, None if they cut none.
    """

    mesh: DeviceMesh | None
    moments: Placements
    scale_shape: tuple[int, ...]
    scales: Placements
    cut: int | None = None


def block_layout(param: torch.Tensor, block_size: int) -> BlockLayout:
    """Where the blocks of a parameter lie, which has elements; the same on every rank.

    Args:
        param: of any placements without Partial.
        block_size: elements of a block.
    """
    if not isinstance(param, DTensor):
        return BlockLayout(None, (), (blocks_of(param.numel(), block_size),), ())
    mesh, placements, shape = param.device_mesh, tuple(param.placements), tuple(param.shape)
    cutting = [axis for axis, p in enumerate(placements) if not isinstance(p, Replicate)]
    if not cutting:
        count = blocks_of(param.numel(), block_size)
        return BlockLayout(mesh, placements, (count,), placements)
    ragged = [axis for axis in cutting if isinstance(placements[axis], RaggedShard)]
    axis = (ragged or cutting)[0]
    others = (*placements[:axis], Replicate(), *placements[axis + 1 :])
    base = even_shape(shape, mesh.shape, others)
    bounds = None if base is None else _bounds(placements[axis], base, mesh.size(axis))
    if base is None or bounds is None or (len(cutting) > 1 and not ragged):
        return _gathered(shape, mesh, max(cutting, key=mesh.size), block_size)
    last = math.prod(base)
    cut = next((at for at in bounds if at % block_size and at != last), None)
    if cut is None:
        return _local(mesh, placements, axis, bounds, block_size)
    return _moved(mesh, placements, axis, base, block_size, cut)


def _bounds(placement: Placement, base: tuple[int, ...], ranks: int) -> list[int] | None:
    """Where each rank of the cut axis ends, in elements of the base; None if not in runs."""
    if isinstance(placement, RaggedShard):
        return [placement.interval(base, rank).stop for rank in range(ranks)]
    if type(placement) is not Shard or placement.dim != 0:
        return None
    rows = -(-base[0] // ranks)  # as torch.chunk cuts
    return [min(base[0], rows * (rank + 1)) * math.prod(base[1:]) for rank in range(ranks)]


def _local(
    mesh: DeviceMesh, placements: Placements, axis: int, bounds: Sequence[int], block_size: int
) -> BlockLayout:
    """Whole blocks on every rank: the state lies as the parameter does."""
    ends = [blocks_of(at, block_size) for at in bounds]
    units = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    scales: list[Placement] = [p if isinstance(p, Replicate) else Shard(0) for p in placements]
    other = [n for n, p in enumerate(scales) if n != axis and isinstance(p, Shard)]
    if not other:
        scales[axis] = RaggedShard((0,), units)
        return BlockLayout(mesh, placements, (ends[-1],), tuple(scales))
    # Scales of other pieces are no more of this one's: two dims keep a checkpoint from mixing them.
    pieces = math.prod(mesh.size(n) for n in other)
    behind = math.prod(mesh.size(n) for n in other if n > axis)
    kind = RaggedShard((0, 1), units)
    scales[axis] = kind if behind == 1 else StridedRaggedShard((0, 1), units, behind)
    return BlockLayout(mesh, placements, (pieces, ends[-1]), tuple(scales))


def _moved(
    mesh: DeviceMesh,
    placements: Placements,
    axis: int,
    base: tuple[int, ...],
    block_size: int,
    cut: int,
) -> BlockLayout:
    """Blocks are cut: the state lies in whole ones, as evenly as they go."""
    bounds = _even(math.prod(base), mesh.size(axis), block_size)
    elements = [end - start for start, end in zip([0, *bounds], bounds, strict=False)]
    given, dims = placements[axis], range(len(base))
    whole = (
        given.with_units(dims, elements)
        if isinstance(given, RaggedShard)
        else RaggedShard(dims, elements)
    )
    moved = (*placements[:axis], whole, *placements[axis + 1 :])
    layout = _local(mesh, moved, axis, bounds, block_size)
    return BlockLayout(mesh, moved, layout.scale_shape, layout.scales, cut)


def _gathered(shape: tuple[int, ...], mesh: DeviceMesh, axis: int, block_size: int) -> BlockLayout:
    """The parameter is cut otherwise than in runs: one axis has whole blocks, others replicas."""
    placements: Placements = (Replicate(),) * mesh.ndim
    return _moved(
        mesh, (*placements[:axis], Shard(0), *placements[axis + 1 :]), axis, shape, block_size, 0
    )  # fmt: skip


def _even(numel: int, ranks: int, block_size: int) -> list[int]:
    count = blocks_of(numel, block_size)
    shares = [count * (rank + 1) // ranks - count * rank // ranks for rank in range(ranks)]
    return [min(numel, blocks * block_size) for blocks in accumulate(shares)]
