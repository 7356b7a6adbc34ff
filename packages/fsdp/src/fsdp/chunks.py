"""Tensors cut along dim 0 into a chunk per rank, in a buffer with each rank's chunks together."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ragged_shard.planner import Layout, TensorSpec

__all__ = ["chunk_layout", "chunk_rows"]


def chunk_rows(rows: int, ranks: int, rank: int) -> int:
    """How many rows `torch.chunk` gives a rank; 0 where there are fewer chunks than ranks."""
    size = -(-rows // ranks)
    return max(0, min(size, rows - rank * size))


def chunk_layout(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], ranks: int, *, alignment: int = 1
) -> Layout:
    """A layout whose tensors are the chunks: of rank 0 first, in the order of names.

    Args:
        names: of the tensors; a chunk's is followed by its rank.
        shapes: of the tensors, of at least one dim.
        ranks: as many chunks of each, and as many shards.
        alignment: elements of which a chunk's begin in the shard is a multiple.
    """
    specs, offsets, end = [], [], 0
    for shape in shapes:
        offsets.append(end)
        numel = chunk_rows(shape[0], ranks, 0) * math.prod(shape[1:])
        end += -(-numel // alignment) * alignment
    for rank in range(ranks):
        for name, shape in zip(names, shapes, strict=True):
            own = (chunk_rows(shape[0], ranks, rank), *shape[1:])
            specs.append(TensorSpec(f"{name}[{rank}]", math.prod(own), 1, own))
    starts = [rank * end + offset for rank in range(ranks) for offset in offsets]
    return Layout(
        tuple(specs), ranks, alignment, align_starts=True, order=tuple(range(len(specs))),
        starts=tuple(starts), shard_size=end, proved_lower_bound=0, exact=False,
    )  # fmt: skip
