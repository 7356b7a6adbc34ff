"""The order "best": the sorted orders first, then some that are made for a smaller shard."""

from ragged_shard.planner import _core
from ragged_shard.planner.in_order import Group, blocks_of, plan_in_order
from ragged_shard.planner.layout import Layout
from ragged_shard.planner.order import by_block, by_shape, by_size
from ragged_shard.planner.reference import least_shard
from ragged_shard.planner.steps import Steps

#: How many shard sizes an order is made for, at most: bisecting, that is one in 16 million.
MOST_ATTEMPTS = 24
#: Placements that may be looked at in all attempts together; some ns each.
MOST_LOOKS = 50_000_000


def plan_best(group: Group) -> Layout:
    """Return the best layout of the orders "given", "block", "shape" and by size, or a better one.

    Better ones come from ``arrange`` for shard sizes between ``least_in_any_order`` and the best
    so far, by bisection. Of equals the first wins. The number of steps is bounded, and no clock
    is asked, so every rank finds the same. ``exact`` is about the order that was found.

    Raises:
        ValueError: as ``plan_in_order``.
    """
    given = range(len(group.specs))
    best = plan_in_order(group, given)
    tensors = blocks_of(group, given)
    steps = Steps(tensors, group.alignment)
    least = steps.at_least(least_shard(tensors, group.world_size, group.alignment))
    for sort in (by_block, by_shape, by_size):
        if best.shard_size > least:
            best = _better(best, plan_in_order(group, sort(group.specs)))
    numels = [tensor.numel for tensor in tensors]
    blocks = [tensor.block for tensor in tensors]
    looks = max(1, len(tensors) * len(set(tensors)))
    low, high = least, best.shard_size  # what to try: low <= size < high
    for _ in range(min(MOST_ATTEMPTS, max(1, MOST_LOOKS // looks))):
        if low >= high:
            break
        middle = (low + high) // 2
        size = steps.at_least(middle)
        order = _core.arrange(numels, blocks, group.world_size, size) if size < high else []
        if order:
            best = _better(best, plan_in_order(group, order))
            high = min(middle, best.shard_size)
        elif size < high:
            low = size + 1
        else:
            high = middle  # from there on no size below the best is possible
    return best


def _better(best: Layout, other: Layout) -> Layout:
    return other if other.shard_size < best.shard_size else best
