"""The block mask of `torch.nn.attention.flex_attention`, from the range of keys of each query.

`torch.nn.attention.flex_attention.create_block_mask` computes each pair of a query and a key. Here
the pairs are ranges, so that each pair of a query and a block of keys is enough, and nothing of the
size of the scores is in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["BLOCK_SIZE", "block_mask_of_ranges"]

BLOCK_SIZE = 128  # queries, and keys, of a block: FlexAttention's default


def block_mask_of_ranges(
    start: torch.Tensor, stop: torch.Tensor, keys: int, block_size: int = BLOCK_SIZE
) -> BlockMask:
    """Returns the block mask of queries that attend to ranges of keys, for any number of heads.

    Args:
        start: place of the first key of each query, int64 of (rows, queries); one row is the mask
            of each row of the batch.
        stop: the place behind its last key, so too.
        keys: the number of keys.
        block_size: the number of queries, and of keys, of a block.
    """
    # Its module imports torch's compiler.
    from torch.nn.attention.flex_attention import BlockMask

    queries = start.shape[1]
    first = torch.arange(0, keys, block_size, device=start.device)
    last = (first + block_size).clamp(max=keys)
    from_, to = start.unsqueeze(-1), stop.unsqueeze(-1)
    attends = (from_ < last) & (to > first) & (from_ < to)
    # A block beyond the last query or key is never full: its padding attends to nothing.
    attends_to_all = (from_ <= first) & (to >= first + block_size)
    padding = (0, 0, 0, -queries % block_size)
    some, every = (
        F.pad(one, padding).unflatten(1, (-1, block_size)) for one in (attends, attends_to_all)
    )
    full = every.all(2)
    partial = some.any(2) & ~full
    has_rows = start.shape[0] > 1

    def mask_mod(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        row = row if has_rows else torch.zeros_like(row)
        return (key >= start[row, query]) & (key < stop[row, query])

    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=block_size, mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )  # fmt: skip


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many blocks of keys each block of queries has, and their numbers first.

    Args:
        blocks: bool of (rows, blocks of queries, blocks of keys).
    """
    chosen = blocks.unsqueeze(1).to(torch.int32)
    order = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()
