"""Which shard sizes are possible at all, whatever the order of the tensors."""

from collections.abc import Sequence
from math import lcm

from ragged_shard.planner.reference import Block, least_shard, round_up
from ragged_shard.planner.spec import MOST_ELEMENTS


class Steps:
    """The shard sizes that tensors over two boundaries leave.

    A tensor of more than 2 * S elements has two boundaries inside, wherever it starts, so S must
    be a multiple of its block.

    Attributes:
        numels: sizes of the tensors, largest first.
        joints: for each, the least common multiple of the step and the blocks up to it; beyond
            2**63 - 1 it means "none", and stays as it is.
        step: every shard size is a multiple of it.
    """

    def __init__(self, tensors: Sequence[Block], step: int) -> None:
        largest_first = sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.block))
        self.numels = [tensor.numel for tensor in largest_first]
        self.joints: list[int] = []
        self.step = joint = step
        for tensor in largest_first:
            joint = lcm(joint, tensor.block) if joint <= MOST_ELEMENTS else joint
            self.joints.append(joint)

    def at_least(self, shard: int) -> int:
        """Return the smallest possible shard size from ``shard`` on: no proof that all fits."""
        number = len(self.numels)
        while True:
            while number and self.numels[number - 1] <= 2 * shard:
                number -= 1
            if number == 0:
                return round_up(shard, self.step)
            until = (self.numels[number - 1] - 1) // 2  # so far the same tensors are large
            multiple = round_up(shard, self.joints[number - 1])
            if multiple <= until:
                return multiple
            shard = until + 1


def least_in_any_order(tensors: Sequence[Block], ranks: int, step: int) -> int:
    """Return a bound below which no order gets: the sum, the largest block, the large tensors.

    Args:
        tensors: as the search wants them, see ``blocks_of``.
        ranks: number of shards.
        step: the shard's size is a multiple of it.
    """
    return Steps(tensors, step).at_least(least_shard(tensors, ranks, step))
