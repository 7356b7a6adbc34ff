"""From gradients into a bucket's buffer, and back: one copy in, none out."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fused_comm.bucket import Bucket, Slot

__all__ = ["own_piece", "pack", "used"]


def pack(
    bucket: Bucket,
    locals_: Mapping[int, torch.Tensor],
    buffer: torch.Tensor,
    divisor: float = 1.0,
    first: bool = True,
) -> None:
    """Copies local gradients into their slots, divided and cast, and says which there are.

    Args:
        bucket: the plan of the buffer.
        locals_: local gradients by parameter; of those missing the slots become zero.
        buffer: of ``bucket.numel`` elements. What lies between slots, and behind the smaller pieces
            of uneven shards, stays as it is: it is reduced, and never read.
        divisor: of every gradient; a power of two.
        first: whether this is a step's first round.
    """
    # Exact, and as a tensor applied in a third of the time of a Python number.
    inverse = torch.tensor(1.0 / divisor, device="cpu")
    into, out_of, lives, empty = [], [], [], []
    for slot in bucket.slots:
        local = locals_.get(slot.entry.index)
        for at, piece in slot.parts:
            place = at.of(buffer)
            if local is None:
                empty.append(place)
                continue
            part = local if piece is None else local[piece]
            if place.data_ptr() == part.data_ptr():
                lives.append(place)
            elif divisor != 1.0 and part.dtype == place.dtype:
                torch.mul(part, inverse, out=place)
            else:
                into.append(place)
                out_of.append(part)
    if into:
        torch._foreach_copy_(into, out_of)
    if divisor != 1.0:
        # Where all gradients live in the buffer, of one row, one call is enough.
        all_live = bucket.route.rows == 1 and len(lives) == len(bucket.slots)
        for place in [buffer] if all_live else [*into, *lives]:
            place.mul_(inverse)
    if empty:
        torch._foreach_zero_(empty)
    rows, begin = buffer.view(bucket.route.rows, bucket.row), bucket.slots[0].flag
    flags = [float(slot.entry.index in locals_) for slot in bucket.slots] + [float(first)]
    if all(flags):
        rows[:, begin : begin + len(flags)].fill_(1.0)
    else:
        rows[:, begin : begin + len(flags)].copy_(torch.tensor(flags))


def own_piece(slot: Slot, row: torch.Tensor) -> torch.Tensor:
    """The view of a reduced row that is one gradient: this rank's shard, or all of it.

    Args:
        slot: whose.
        row: what the collectives have left on this rank.
    """
    return slot.own_place.of(row)


def used(slot: Slot, row: torch.Tensor) -> bool:
    """Whether any rank had a gradient for this slot; waits for the device."""
    return bool((row[slot.flag] > 0).item())
