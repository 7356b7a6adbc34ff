"""Finds the smallest shard for a group of tensors: in one order, and over several orders.

`_core` does the search in C++; reference.py is its definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ragged_shard.planner import _core
from ragged_shard.planner.solver.orders import by_block, by_shape, by_size
from ragged_shard.planner.solver.reference import BlockedTensor, least_shard, round_up
from ragged_shard.planner.spec import MOST_ELEMENTS, TensorSpec

#: The most shard sizes for which "best" arranges an order: bisecting, one in 16 million.
MOST_ATTEMPTS = 24
#: The most placements that all attempts together look at; each takes some ns.
MOST_LOOKS = 50_000_000


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The validated arguments of ``plan_layout``, apart from the order.

    Attributes:
        specs: the tensors, as passed.
        world_size: the number of shards.
        alignment: the shard's size is a multiple of it.
        align_starts: whether every start is a multiple of it too.
        node_limit: the number of nodes after which a search gives up.
    """

    specs: tuple[TensorSpec, ...]
    world_size: int
    alignment: int
    align_starts: bool
    node_limit: int


@dataclass(frozen=True, slots=True)
class Solution:
    """The smallest shard that was found for a group, and where its tensors start.

    Attributes:
        order: indices of the specs, in the order of the buffer.
        starts: the start of each tensor in the buffer, in the order of the specs.
        shard_size: elements of each shard.
        proved_lower_bound: no shard for this order is smaller.
    """

    order: tuple[int, ...]
    starts: tuple[int, ...]
    shard_size: int
    proved_lower_bound: int

    @property
    def exact(self) -> bool:
        """Whether the shard is proved to be the smallest for its order."""
        return self.proved_lower_bound == self.shard_size


class ShardSizes:
    """The shard sizes that are possible for a group, whatever its order.

    A tensor of more than 2 * S elements contains two boundaries wherever it starts, so S must be a
    multiple of its block.

    Attributes:
        numels: sizes of the tensors, largest first.
        joints: for each, the least common multiple of the step and the blocks up to it; a value
            above 2**63 - 1 means that no size is possible, and is not multiplied further.
        step: every shard size is a multiple of it.
    """

    def __init__(self, tensors: Sequence[BlockedTensor], step: int) -> None:
        largest_first = sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.block))
        self.numels = [tensor.numel for tensor in largest_first]
        self.joints: list[int] = []
        self.step = joint = step
        for tensor in largest_first:
            joint = lcm(joint, tensor.block) if joint <= MOST_ELEMENTS else joint
            self.joints.append(joint)

    def at_least(self, shard: int) -> int:
        """Returns the smallest possible size from ``shard`` on; the tensors may not fit it."""
        number = len(self.numels)
        while True:
            while number and self.numels[number - 1] <= 2 * shard:
                number -= 1
            if number == 0:
                return round_up(shard, self.step)
            until = (self.numels[number - 1] - 1) // 2  # up to here the same tensors are large
            multiple = round_up(shard, self.joints[number - 1])
            if multiple <= until:
                return multiple
            shard = until + 1


def least_in_any_order(tensors: Sequence[BlockedTensor], ranks: int, step: int) -> int:
    """Returns a lower bound for every order, from the sum, the largest block and large tensors.

    Args:
        tensors: the group, as ``blocked_tensors`` returns it.
        ranks: the number of shards.
        step: the shard's size is a multiple of it.
    """
    return ShardSizes(tensors, step).at_least(least_shard(tensors, ranks, step))


def blocked_tensors(request: PlanRequest, order: Sequence[int]) -> list[BlockedTensor]:
    """Returns the tensors as the search takes them, in the order of the buffer.

    Aligned starts need no rule of their own in the search. Where all starts and boundaries are
    multiples of the alignment, a boundary is inside a tensor, and between two of its blocks,
    exactly where it is for a tensor rounded up to the alignment with blocks of
    lcm(block, alignment). If such a block is larger than the tensor, no boundary may be inside.
    """
    specs = [request.specs[i] for i in order]
    if not request.align_starts:
        return [BlockedTensor(spec.numel, spec.block) for spec in specs]
    rounded = [
        BlockedTensor(round_up(spec.numel, request.alignment), lcm(spec.block, request.alignment))
        for spec in specs
    ]
    return [BlockedTensor(tensor.numel, min(tensor.block, tensor.numel or 1)) for tensor in rounded]


def solve_in_order(request: PlanRequest, order: Sequence[int]) -> Solution:
    """Finds the smallest shard for one order.

    Args:
        request: what to plan.
        order: each index of ``request.specs`` once.

    Raises:
        ValueError: sizes, rounded up to the alignment, or the buffer exceed 2**63 - 1.
    """
    tensors = blocked_tensors(request, order)
    total = sum(tensor.numel for tensor in tensors)
    if total > MOST_ELEMENTS:
        raise ValueError(
            f"specs: expected at most 2**63 - 1 elements, got {total} in {len(tensors)} tensors "
            f"rounded up to the alignment {request.alignment}; align_starts=False needs fewer"
        )
    found = _core.search(
        [tensor.numel for tensor in tensors],
        [tensor.block for tensor in tensors],
        request.world_size,
        request.alignment,
        request.node_limit,
    )
    if not found.any:
        raise ValueError(
            f"world_size: expected a buffer of at most 2**63 - 1 elements, got {total} elements "
            f"on {request.world_size} ranks with alignment {request.alignment}, for which no such "
            "layout was found; pass fewer ranks, smaller blocks or a smaller alignment"
        )
    starts = [0] * len(tensors)
    for i, start in zip(order, found.starts, strict=True):
        starts[i] = start
    return Solution(tuple(order), tuple(starts), found.shard, found.proved)


def solve_best_order(request: PlanRequest) -> Solution:
    """Finds the best of the orders "given", "block", "shape" and by size, or a better one.

    Better ones come from `_core.arrange` for shard sizes between ``least_in_any_order`` and the
    best so far, by bisection. The first of equals is returned. The number of steps is bounded and
    no clock is read, so every rank finds the same. The result is exact for the order it has.

    Raises:
        ValueError: as ``solve_in_order``.
    """
    given = range(len(request.specs))
    best = solve_in_order(request, given)
    tensors = blocked_tensors(request, given)
    sizes = ShardSizes(tensors, request.alignment)
    least = sizes.at_least(least_shard(tensors, request.world_size, request.alignment))
    for sort in (by_block, by_shape, by_size):
        if best.shard_size > least:
            best = _smaller(best, solve_in_order(request, sort(request.specs)))
    numels = [tensor.numel for tensor in tensors]
    blocks = [tensor.block for tensor in tensors]
    looks = max(1, len(tensors) * len(set(tensors)))
    low, high = least, best.shard_size  # sizes to try: low <= size < high
    for _ in range(min(MOST_ATTEMPTS, max(1, MOST_LOOKS // looks))):
        if low >= high:
            break
        middle = (low + high) // 2
        size = sizes.at_least(middle)
        order = _core.arrange(numels, blocks, request.world_size, size) if size < high else []
        if order:
            best = _smaller(best, solve_in_order(request, order))
            high = min(middle, best.shard_size)
        elif size < high:
            low = size + 1
        else:
            high = middle  # from there on no size below the best is possible
    return best


def _smaller(best: Solution, other: Solution) -> Solution:
    return other if other.shard_size < best.shard_size else best
