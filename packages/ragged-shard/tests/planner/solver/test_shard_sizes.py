"""Which shard sizes are possible in any order, against brute force over all orders."""

import random
from itertools import permutations

from ragged_shard.planner.solver.reference import BlockedTensor, may_fit, search
from ragged_shard.planner.solver.search import ShardSizes, least_in_any_order


def instance(draw):
    tensors = []
    for _ in range(draw.randint(0, 4)):
        numel = draw.randint(0, 40)
        tensors.append(
            BlockedTensor(numel, draw.randint(1, max(1, numel // draw.choice([1, 2, 5]))))
        )
    return tensors, draw.randint(1, 9), draw.choice([1, 2, 3])


def test_sizes_that_it_leaves_out_do_not_fit():
    draw = random.Random(0)
    left_out = 0
    for _ in range(1_000):
        tensors, ranks, step = instance(draw)
        steps = ShardSizes(tensors, step)
        possible = {steps.at_least(shard) for shard in range(1, 30)}
        for shard in set(range(step, 30, step)) - possible:
            left_out += 1
            assert not may_fit(tensors, ranks, 1, shard, shard)
    assert left_out > 1_000


def test_a_size_is_left_out_only_where_two_boundaries_cut_a_block():
    for shard, possible in [(1, 5), (5, 5), (6, 10), (11, 15), (15, 15), (16, 16), (17, 17)]:
        assert (
            ShardSizes([BlockedTensor(31, 5), BlockedTensor(7, 1)], 1).at_least(shard) == possible
        )


def test_steps_that_no_int64_holds_are_passed_over():
    large = [BlockedTensor(10**6 + k, 10**5 + k) for k in range(20)]
    assert ShardSizes(large, 1).at_least(1) == 500_010  # none is large there
    assert ShardSizes(large, 1).at_least(10**6) == 10**6


def test_no_order_gets_below_the_bound():
    draw = random.Random(1)
    reached = 0
    for _ in range(300):
        tensors, ranks, step = instance(draw)
        least = least_in_any_order(tensors, ranks, step)
        best = min(search(order, ranks, step, 10**6).shard for order in permutations(tensors))
        assert best >= least
        reached += best == least
    assert reached > 150
