"""``plan_layout``: the smallest buffer of equal shards for a group of tensors."""

from collections.abc import Iterable

from ragged_shard.planner.best import plan_best
from ragged_shard.planner.in_order import Group, plan_in_order
from ragged_shard.planner.layout import Layout
from ragged_shard.planner.order import Order, permutation
from ragged_shard.planner.spec import MOST_ELEMENTS, TensorSpec, check_size

#: Nodes after which a search gives up. Each takes a few ns per tensor.
NODE_LIMIT = 20_000


def plan_layout(
    specs: Iterable[TensorSpec],
    world_size: int,
    *,
    alignment: int = 1,
    align_starts: bool = False,
    order: Order = "given",
    node_limit: int = NODE_LIMIT,
) -> Layout:
    """Lay tensors out in one buffer of equal shards, the shards as small as can be.

    No boundary of shards cuts a block, each tensor is contiguous, and every tensor starts as
    early as its shards allow. The same arguments give the same layout on every rank and machine.

    Args:
        specs: the tensors of the group; may be empty.
        world_size: number of shards.
        alignment: the shard's size is a multiple of it, in elements: for 16 bytes of bfloat16, 8.
        align_starts: whether every tensor's start is a multiple of the alignment too.
        order: of the tensors in the buffer. "given" keeps the one of ``specs``; "block" and
            "shape" sort by it, largest first; "best" tries several orders and a bounded search
            and is never worse than those; or an explicit permutation of the places in ``specs``,
            or a function that returns one.
        node_limit: nodes after which the search for one order gives up. The layout then has
            ``exact=False`` and a ``proved_lower_bound`` below its ``shard_size``.

    Returns:
        The layout. Its shard is the smallest for its order if ``exact``.

    Raises:
        ValueError: an argument has the wrong type or value, there is an unknown order, or sizes
            go beyond 2**63 - 1.

    Source: veScale-FSDP, section 5; see reference.py for the search.
    """
    group = Group(
        _checked_specs(specs),
        check_size("world_size", world_size, least=1),
        check_size("alignment", alignment, least=1),
        align_starts,
        check_size("node_limit", node_limit, least=1),
    )
    if not isinstance(align_starts, bool):
        raise ValueError(f"align_starts: got {align_starts!r}, wants True or False")
    if isinstance(order, str) and order == "best":
        return plan_best(group)
    return plan_in_order(group, permutation(order, group.specs))


def _checked_specs(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The specs as a tuple, if they are specs and an int64 can count their elements."""
    if not isinstance(specs, Iterable):
        raise ValueError(f"specs: got {specs!r}, wants a sequence of TensorSpec")
    checked, total = tuple(specs), 0
    for place, spec in enumerate(checked):
        if not isinstance(spec, TensorSpec):
            raise ValueError(f"specs[{place}]: got {spec!r}, wants a TensorSpec")
        total += spec.numel
        if total > MOST_ELEMENTS:
            raise ValueError(
                f"specs: got {total} elements up to {spec.name!r} of {spec.numel}, wants at most "
                "2**63 - 1 altogether"
            )
    return checked
