"""The search: in Python, in C++, and by brute force over every start of every tensor."""

import random
from math import lcm

import pytest

from ragged_shard.planner import _core
from ragged_shard.planner.solver.reference import BlockedTensor, may_fit, place, round_up, search

ENOUGH = 10**6  # nodes
MOST = 2**63 - 1


def legal(start, tensor, shard):
    """Whether every block is inside one shard, by checking each block."""
    for first in range(0, tensor.numel, tensor.block):
        last = min(first + tensor.block, tensor.numel) - 1
        if (start + first) // shard != (start + last) // shard:
            return False
    return True


def brute_fits(tensors, ranks, shard):
    """Whether any combination of legal starts fits: by following all ends that can be reached."""
    ends = {0}
    for tensor in tensors:
        ends = {
            start + tensor.numel
            for end in ends
            for start in range(end, ranks * shard - tensor.numel + 1)
            if legal(start, tensor, shard)
        }
    return bool(ends)


def brute_search(tensors, ranks, step):
    """The smallest shard: by trying every multiple of the step from 0."""
    shard = 0 if all(tensor.numel == 0 for tensor in tensors) else step
    while shard and not brute_fits(tensors, ranks, shard):
        shard += step
    return shard


def small_instance(draw):
    """Some tensors that brute force can do, ranks, and a step."""
    tensors = []
    for _ in range(draw.randint(0, 5)):
        numel = draw.choice([0, 1, draw.randint(1, 14), draw.randint(1, 14)])
        least = draw.choice([1, 1, numel, draw.randint(0, numel), draw.randint(0, numel)])
        tensors.append(BlockedTensor(numel, max(least, 1)))
    return tensors, draw.randint(1, 7), draw.choice([1, 1, 2, 3, 4])


def large_instance(draw):
    """Tensors of any scale, alike or not: with many ranks, few, or so many that int64 ends."""
    scale = 10 ** draw.uniform(1, 12)
    blocks = [max(1, int(scale * draw.random())) for _ in range(draw.randint(1, 3))]
    style = draw.randrange(5)
    tensors = []
    for _ in range(draw.randint(1, 25)):
        numel = int(scale * draw.choice([0, draw.random(), 10 * draw.random(), 2 + draw.random()]))
        block = (
            draw.randint(1, max(numel, 1)),
            draw.choice(blocks),
            draw.randint(1, 50),
            draw.choice([1, numel]),
            numel // draw.randint(2, 40),
        )[style]
        tensors.append(BlockedTensor(numel, max(1, min(block, numel))))
    ranks = draw.choice([draw.randint(1, 40), int(2 ** draw.uniform(0, 17)), 10**12])
    return tensors, ranks, draw.choice([1, 1, 8, 12, 128])


def core_search(tensors, ranks, step, most_nodes=ENOUGH):
    numels = [tensor.numel for tensor in tensors]
    return _core.search(numels, [tensor.block for tensor in tensors], ranks, step, most_nodes)


def assert_same(core, reference, instance):
    assert core.any == reference.any, instance
    assert core.nodes == reference.nodes, instance
    if reference.any:
        assert core.proved == reference.proved, instance
        assert core.shard == reference.shard, instance
        assert core.starts == reference.starts, instance


def test_2000_small_instances_have_the_shard_that_brute_force_finds():
    draw = random.Random(0)
    for _ in range(2_000):
        instance = small_instance(draw)
        found = search(*instance, ENOUGH)
        assert found.shard == brute_search(*instance), instance
        assert found.proved == found.shard, instance
        assert_same(core_search(*instance), found, instance)


def test_10000_instances_are_the_same_in_cpp_node_by_node():
    draw = random.Random(1)
    ended = gave_up = impossible = 0
    for _ in range(10_000):
        instance = large_instance(draw)
        # A limit keeps Python's share short, and compares what is done when it is met.
        limit = draw.choice([1, 2, 3, 20, 100])
        found = search(*instance, limit)
        assert_same(core_search(*instance, limit), found, instance)
        ended += found.any and found.proved == found.shard and found.nodes > 1
        gave_up += found.any and found.proved < found.shard
        impossible += not found.any
    assert min(ended, gave_up, impossible) > 500, (ended, gave_up, impossible)


def test_every_start_is_legal_and_as_early_as_it_can_be():
    draw = random.Random(2)
    for _ in range(500):
        tensors, ranks, step = small_instance(draw)
        found = search(tensors, ranks, step, ENOUGH)
        end = 0
        for tensor, start in zip(tensors, found.starts, strict=True):
            assert start >= end
            assert [legal(at, tensor, found.shard) for at in range(end, start + 1)] == [False] * (
                start - end
            ) + [True]
            end = start + tensor.numel
        assert end <= ranks * found.shard


def test_a_range_is_refuted_only_if_each_of_its_sizes_is():
    draw = random.Random(3)
    refuted = 0
    for _ in range(2_000):
        tensors, ranks, step = small_instance(draw)
        low = round_up(draw.randint(1, 10), step)
        high = low + step * draw.randint(0, 4)
        if not may_fit(tensors, ranks, step, low, high):
            refuted += high > low
            for shard in range(low, high + 1, step):
                assert not brute_fits(tensors, ranks, shard), (tensors, ranks, step, shard)
    assert refuted > 200


def test_a_single_size_is_decided_exactly():
    draw = random.Random(4)
    for _ in range(3_000):
        tensors, ranks, _ = small_instance(draw)
        shard = draw.randint(1, 14)
        fits = brute_fits(tensors, ranks, shard)
        assert may_fit(tensors, ranks, 1, shard, shard) == fits, (tensors, ranks, shard)


def test_what_fits_still_fits_with_the_blocks_multiple_more():
    draw = random.Random(5)
    for _ in range(300):
        tensors, ranks, _ = small_instance(draw)
        multiple = lcm(*(tensor.block for tensor in tensors))
        for shard in range(1, 25):
            if may_fit(tensors, ranks, 1, shard, shard):
                assert may_fit(tensors, ranks, 1, shard + multiple, shard + multiple)


def test_a_larger_shard_may_fit_worse():
    tensors = [BlockedTensor(30, 5)]
    assert [may_fit(tensors, 3, 1, size, size) for size in (10, 11, 14, 15)] == [1, 0, 0, 1]


def test_refuting_ranges_needs_few_nodes_where_an_upward_scan_needs_a_million():
    draw = random.Random(6)
    tensors = [BlockedTensor(draw.randint(1, 10**6), 1) for _ in range(20)]
    tensors += [BlockedTensor(numel, numel) for numel in draw.sample(range(10**6, 10**7), 20)]
    found = search(tensors, 16, 1, ENOUGH)
    scanned = found.shard - sum(tensor.numel for tensor in tensors) // 16
    assert scanned > 10**6
    assert found.nodes < 100


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_search_that_gives_up_brackets_the_smallest_shard(limit):
    draw = random.Random(7)
    gave_up = 0
    for _ in range(1_000):
        tensors, ranks, step = small_instance(draw)
        found = search(tensors, ranks, step, limit)
        smallest = search(tensors, ranks, step, ENOUGH).shard
        assert found.proved <= smallest <= found.shard, (tensors, ranks, step)
        assert found.nodes <= limit
        assert brute_fits(tensors, ranks, found.shard) or not found.shard
        gave_up += found.proved < found.shard
    assert gave_up


NEAR_THE_END = [
    ([(MOST, 1)], 1, 1),
    ([(MOST, MOST)], 1, 1),
    ([(MOST, 1)], 1, 2),  # rounded up, the shard is too large
    ([(MOST, 1)], 2, 1),  # 2 shards are one element too large
    ([(MOST - 1, 1)], 2, 1),
    ([(MOST - 1, 2**62 - 1)], 2, 1),
    ([(2**62, 2**62)], 2, 1),  # a shard of 2**62 makes a buffer of 2**63
    ([(2**62 - 1, 2**62 - 1), (2**62 - 1, 2**62 - 1)], 2, 1),
    ([(2**62 - 1, 3), (2**62 - 5, 7)], 3, 1),
    ([(2**62, 2**31 - 1), (2**61, 2**31 + 1), (2**60, 2**29 + 3)], 1000, 1),  # lcm above int64
    ([(1, 1), (2**63 - 3, 3)], 2, 1),  # padded to its block, it would end behind 2**63
    ([(3 * 2**60, 2**60), (17 * 2**57, 17)], 6, 1),  # 17 * 2**60 is 2**60, modulo 2**64
    ([(2**40, 2**40)], 2**40, 1),
    ([(5, 3)], MOST, 1),
    ([(5, 1)], MOST, 1),
    ([(2**40, 1)], 1, MOST),
    ([(2**40, 7)], 3, 2**61 + 1),
    ([(2**61, 2**20), (2**61, 1), (1, 1), (2**60, 3**30)], 5, 2**13),
]


@pytest.mark.parametrize(("tensors", "ranks", "step"), NEAR_THE_END)
@pytest.mark.parametrize("limit", [1, 300])
def test_cpp_does_not_overflow_where_int64_ends(tensors, ranks, step, limit):
    tensors = [BlockedTensor(numel, block) for numel, block in tensors]
    found = search(tensors, ranks, step, limit)
    assert_same(core_search(tensors, ranks, step, limit), found, tensors)
    assert not found.any or found.shard * ranks <= MOST


def test_place_is_what_the_search_returns():
    tensors = [BlockedTensor(30, 5), BlockedTensor(4, 4), BlockedTensor(7, 1)]
    found = search(tensors, 4, 1, ENOUGH)
    assert found.starts == place(tensors, 4, found.shard)


def test_the_core_refuses_lists_of_different_lengths():
    with pytest.raises(ValueError, match="differ in length"):
        _core.search([1, 2], [1], 1, 1, 1)
