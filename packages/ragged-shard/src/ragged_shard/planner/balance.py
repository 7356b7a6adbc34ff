"""Assigns the shards of a layout to ranks, where holding a tensor makes its rank work."""

from collections.abc import Sequence
from dataclasses import replace

from ragged_shard.planner.layout import Layout
from ragged_shard.planner.spec import check_size


def balance(layout: Layout, work: Sequence[int], busy: Sequence[int]) -> Layout:
    """Moves whole shards to other ranks, so that the busiest rank has as little work as possible.

    A model has many groups, and the planner lays out one at a time: if every layout gave rank 0
    its largest tensor, rank 0 would do the work of all the largest. Shards that share a tensor
    with a neighbour keep their ranks; of the others, the one with most work goes to the rank that
    is least busy, and so on. That is optimal for this layout; the shard's size and padding stay.

    Args:
        layout: of a group.
        work: for each tensor, in the order of ``layout.specs``, the work that holding it means for
            a rank, in any unit. Only tensors that one rank holds entirely count.
        busy: the work of each rank for other groups, in the same unit.

    Returns:
        A layout of the same shards in another order, or the same one if none is better. Its
        ``exact`` and ``proved_lower_bound`` state only what holds for all orders.

    Raises:
        ValueError: another number of tensors or ranks, or amounts that are negative or no integers.
    """
    _check("work", work, len(layout.specs), "tensor")
    _check("busy", busy, layout.world_size, "rank")
    shards = work_of_shards(layout, work)
    pinned = {
        rank
        for i in range(len(layout.specs))
        if len(owners := layout.owners(i)) > 1
        for rank in owners
    }
    free = [rank for rank in range(layout.world_size) if rank not in pinned]
    heaviest = sorted(free, key=lambda rank: -shards[rank])
    idlest = sorted(free, key=lambda rank: busy[rank])
    target = dict(zip(heaviest, idlest, strict=True))
    now = max((shards[rank] + busy[rank] for rank in free), default=0)
    then = max((shards[rank] + busy[target[rank]] for rank in free), default=0)
    return _moved(layout, target) if then < now else layout


def work_of_shards(layout: Layout, work: Sequence[int]) -> list[int]:
    """Returns the work of each rank's shard: that of the tensors it holds entirely."""
    shards = [0] * layout.world_size
    for i, amount in enumerate(work):
        if len(owners := layout.owners(i)) == 1:
            shards[owners.start] += amount
    return shards


def _moved(layout: Layout, target: dict[int, int]) -> Layout:
    """Returns the layout with shards on other ranks; tensors without elements are first."""
    starts = []
    for i, start in enumerate(layout.starts):
        owners = layout.owners(i)
        rank = owners.start
        new = target.get(rank, rank)
        starts.append(start + (new - rank) * layout.shard_size if owners else 0)
    least = -(-layout.lower_bound // layout.alignment) * layout.alignment
    return replace(
        layout,
        order=tuple(sorted(layout.order, key=lambda i: (layout.specs[i].numel > 0, starts[i]))),
        starts=tuple(starts),
        proved_lower_bound=least,
        exact=least == layout.shard_size,
    )


def _check(what: str, amounts: Sequence[int], count: int, of: str) -> None:
    if len(amounts) != count:
        raise ValueError(f"{what}: expected {count} amounts, one per {of}, got {len(amounts)}")
    for amount in amounts:
        check_size(what, amount, least=0)
