"""Planning a checked group in one order: from specs to what the core searches, and back."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ragged_shard.planner import _core
from ragged_shard.planner.layout import Layout
from ragged_shard.planner.reference import Block, round_up
from ragged_shard.planner.spec import MOST_ELEMENTS, TensorSpec


@dataclass(frozen=True, slots=True)
class Group:
    """What ``plan_layout`` was asked for, apart from the order, and checked.

    Attributes:
        specs: the tensors, as given.
        world_size: number of shards.
        alignment: the shard's size is a multiple of it.
        align_starts: whether every start is a multiple of it too.
        node_limit: nodes after which a search gives up.
    """

    specs: tuple[TensorSpec, ...]
    world_size: int
    alignment: int
    align_starts: bool
    node_limit: int


def blocks_of(group: Group, order: Sequence[int]) -> list[Block]:
    """Return the tensors as the search wants them, in the order of the buffer.

    Starts need no rule of their own there: where all starts and boundaries are multiples of the
    alignment, a boundary falls into a tensor, and between two of its blocks, exactly where it
    does for a tensor rounded up to the alignment with blocks of lcm(block, alignment). If those
    are larger than the tensor, no boundary may fall into it at all.
    """
    specs = [group.specs[i] for i in order]
    if not group.align_starts:
        return [Block(spec.numel, spec.block) for spec in specs]
    rounded = [
        Block(round_up(spec.numel, group.alignment), lcm(spec.block, group.alignment))
        for spec in specs
    ]
    return [Block(tensor.numel, min(tensor.block, tensor.numel or 1)) for tensor in rounded]


def plan_in_order(group: Group, order: Sequence[int]) -> Layout:
    """Return the layout with the smallest shard for one order.

    Args:
        group: what to plan.
        order: each place in ``group.specs`` once.

    Raises:
        ValueError: sizes, rounded up to the alignment, or the buffer go beyond 2**63 - 1.
    """
    tensors = blocks_of(group, order)
    total = sum(tensor.numel for tensor in tensors)
    if total > MOST_ELEMENTS:
        raise ValueError(
            f"specs: got {total} elements in {len(tensors)} tensors rounded up to the alignment "
            f"{group.alignment}, wants at most 2**63 - 1; align_starts=False needs fewer"
        )
    found = _core.search(
        [tensor.numel for tensor in tensors],
        [tensor.block for tensor in tensors],
        group.world_size,
        group.alignment,
        group.node_limit,
    )
    if not found.any:
        raise ValueError(
            f"world_size: got {group.world_size} with alignment {group.alignment} for {total} "
            "elements: no layout found with a buffer of at most 2**63 - 1 elements; wants fewer "
            "ranks, smaller blocks or a smaller alignment"
        )
    starts = [0] * len(tensors)
    for i, start in zip(order, found.starts, strict=True):
        starts[i] = start
    return Layout(
        specs=group.specs,
        world_size=group.world_size,
        alignment=group.alignment,
        align_starts=group.align_starts,
        order=tuple(order),
        starts=tuple(starts),
        shard_size=found.shard,
        proved_lower_bound=found.proved,
        exact=found.proved == found.shard,
    )
