"""An order that wastes little for one shard size, in plain Python: what the C++ core must do."""

from collections.abc import Sequence

from ragged_shard.planner.reference import Block, Cursor, advance


def padding_to(behind: Cursor, cursor: Cursor, tensor: Block, shard: int) -> int:
    """Return how many elements lie between a cursor and the tensor placed behind it."""
    boundaries = behind.boundary - cursor.boundary
    return boundaries * shard + behind.offset - tensor.numel - cursor.offset


def arrange(tensors: Sequence[Block], ranks: int, shard: int) -> list[int]:
    """Return the places of the tensors in an order made for one shard size.

    It places them one by one, each time the one that needs the least padding: of equals the one
    with the largest block, then the largest, then the first. That is best-fit decreasing of bin
    packing, if blocks are whole tensors.

    Args:
        tensors: the group.
        ranks: number of shards.
        shard: elements of each.

    Returns:
        Each place in ``tensors`` once, or nothing if the tensors do not fit in this order.
    """
    left = sorted(range(len(tensors)), key=lambda i: (-tensors[i].block, -tensors[i].numel, i))
    order: list[int] = []
    cursor = Cursor(0, 0)
    while left:
        choices = []
        for i in left:
            behind = advance(cursor, tensors[i], 1, shard, shard)
            if behind is not None:
                choices.append((padding_to(behind, cursor, tensors[i], shard), i))
        if not choices:
            return []
        _, chosen = min(choices, key=lambda choice: choice[0])  # the first of equals
        behind = advance(cursor, tensors[chosen], 1, shard, shard)
        assert behind is not None
        cursor = behind
        if cursor.boundary * shard + cursor.offset > ranks * shard:
            return []
        left.remove(chosen)
        order.append(chosen)
    return order
