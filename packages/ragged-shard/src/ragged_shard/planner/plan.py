"""``plan_layout``: the smallest buffer of equal shards for a group of tensors."""

from collections.abc import Iterable

from ragged_shard.planner.layout import Layout
from ragged_shard.planner.solver.orders import TensorOrder, permutation
from ragged_shard.planner.solver.search import (
    PlanRequest,
    solve_best_order,
    solve_in_order,
)
from ragged_shard.planner.spec import MOST_ELEMENTS, TensorSpec, check_size

#: The number of nodes after which a search gives up. Each takes a few ns per tensor.
NODE_LIMIT = 20_000


def plan_layout(
    specs: Iterable[TensorSpec],
    world_size: int,
    *,
    alignment: int = 1,
    align_starts: bool = False,
    order: TensorOrder = "given",
    node_limit: int = NODE_LIMIT,
) -> Layout:
    """Lays tensors out in one buffer of equal shards, which are as small as possible.

    No shard boundary splits a block, each tensor is contiguous, and every tensor starts as early
    as its shards allow. The same arguments give the same layout on every rank and machine.

    Args:
        specs: the tensors of the group; may be empty.
        world_size: the number of shards.
        alignment: the shard's size is a multiple of it, in elements: for 16 bytes of bfloat16, 8.
        align_starts: whether every tensor's start is a multiple of the alignment too.
        order: of the tensors in the buffer. "given" keeps the order of ``specs``; "block" and
            "shape" sort by it, largest first; "best" tries several orders and a bounded search
            and is never worse than those; or an explicit permutation of the indices of ``specs``,
            or a function that returns one.
        node_limit: the number of nodes after which the search for one order gives up. The layout
            then has ``exact=False`` and a ``proved_lower_bound`` below its ``shard_size``.

    Returns:
        The layout. Its shard is the smallest for its order if ``exact``.

    Raises:
        ValueError: an argument has a wrong type or value, the order is unknown, or sizes exceed
            2**63 - 1.

    Source: veScale-FSDP, section 5; solver/reference.py describes the search.
    """
    request = PlanRequest(
        _checked_specs(specs),
        check_size("world_size", world_size, least=1),
        check_size("alignment", alignment, least=1),
        align_starts,
        check_size("node_limit", node_limit, least=1),
    )
    if not isinstance(align_starts, bool):
        raise ValueError(f"align_starts: expected True or False, got {align_starts!r}")
    if isinstance(order, str) and order == "best":
        solution = solve_best_order(request)
    else:
        solution = solve_in_order(request, permutation(order, request.specs))
    return Layout(
        specs=request.specs,
        world_size=request.world_size,
        alignment=request.alignment,
        align_starts=request.align_starts,
        order=solution.order,
        starts=solution.starts,
        shard_size=solution.shard_size,
        proved_lower_bound=solution.proved_lower_bound,
        exact=solution.exact,
    )


def _checked_specs(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Returns the specs as a tuple whose elements an int64 can count.

    Raises:
        ValueError: they are not specs, or have too many elements.
    """
    if not isinstance(specs, Iterable):
        raise ValueError(f"specs: expected a sequence of TensorSpec, got {specs!r}")
    checked, total = tuple(specs), 0
    for index, spec in enumerate(checked):
        if not isinstance(spec, TensorSpec):
            raise ValueError(f"specs[{index}]: expected a TensorSpec, got {spec!r}")
        total += spec.numel
        if total > MOST_ELEMENTS:
            raise ValueError(
                f"specs: expected at most 2**63 - 1 elements in all, got {total} up to "
                f"{spec.name!r} of {spec.numel}"
            )
    return checked
