"""The mask of the batch that a model with a sharded sequence runs: tokens' order and padding.

A model's own code does not know the tokens of other ranks, and would make masks of places in the
ranks' order. So the script describes the mask, around the step: inputs are ordered and padded by
it, attention reads it, and outputs are put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from plan_api.context_parallel.mask import AttentionMask
from plan_api.context_parallel.order import SequenceSharding, TokenOrder, balanced_order

__all__ = ["Batch", "attention_mask", "current_batch", "order_of"]


@dataclass
class Batch:
    """A batch whose mask is known.

    Attributes:
        mask: of each sequence, with all ranks' tokens.
        length: of the sequence, without padding; None: no tensor has been sharded yet.
    """

    mask: AttentionMask
    length: int | None = None


_batches: list[Batch] = []


@contextmanager
def attention_mask(mask: AttentionMask) -> Iterator[None]:
    """Describes the mask of a batch to models whose sequence is sharded (`Plan.context`).

    Within it inputs of `Plan.sequence` may have any length: they are padded at their end, labels
    with -100, and outputs that `Plan.sequence` restores are unpadded. In ``order="balanced"`` ranks
    have tokens whose area of the mask is about the same. Each attention intersects the mask with
    its own, such as causal. The model itself gets no attention mask and no positions of documents;
    rotary embeddings of positions in the whole sequence give the same attention, as they depend on
    differences.

    Run forward and backward within it, as modules that are recomputed need it too.

    Args:
        mask: of this rank's rows of the batch, with all tokens of the sequence.
    """
    batch = Batch(mask)
    _batches.append(batch)
    try:
        yield
    finally:
        _batches.remove(batch)


def current_batch() -> Batch | None:
    """Returns the batch whose mask is known; None: there is none."""
    return _batches[-1] if _batches else None


def order_of(sharding: SequenceSharding, length: int, what: str) -> TokenOrder:
    """Returns the order of a sequence.

    Args:
        sharding: of the plan.
        length: of a global tensor, with or without padding.
        what: the tensor, for messages.

    Raises:
        ValueError: the ranks do not divide the length, and there is no mask; or the mask is of
            another sequence.
    """
    batch = current_batch()
    if batch is None:
        sharding.check_length(length, what)
        return sharding.token_order(length)
    if batch.length is None:
        batch.mask.check(length, None, what)
        batch.length = length
    order = _order(sharding, batch.mask, batch.length)
    if length not in (order.length, order.padded_length):
        raise ValueError(
            f"{what}: expected a sequence of {order.length} tokens within attention_mask, the "
            f"length of the first one that was sharded, got {length}; begin a block for each batch"
        )
    return order


@lru_cache(maxsize=64)
def _order(sharding: SequenceSharding, mask: AttentionMask, length: int) -> TokenOrder:
    if sharding.name == "balanced":
        return balanced_order(mask, length, sharding.ranks)
    return sharding.token_order(length)
