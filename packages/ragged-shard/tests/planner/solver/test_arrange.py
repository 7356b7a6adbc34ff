"""The order made for one shard size: in Python, in C++, and what it promises."""

import random

from ragged_shard.planner import _core
from ragged_shard.planner.solver.reference import BlockedTensor, arrange, may_fit, place


def instance(draw):
    kinds = []
    for _ in range(draw.randint(1, 6)):
        numel = draw.choice([0, 1, draw.randint(1, 30), draw.randint(1, 30)])
        kinds.append(BlockedTensor(numel, max(1, draw.choice([1, numel, draw.randint(0, numel)]))))
    tensors = [draw.choice(kinds) for _ in range(draw.randint(0, 15))]
    return tensors, draw.randint(1, 8), draw.randint(1, 60)


def core_arrange(tensors, ranks, shard):
    numels = [tensor.numel for tensor in tensors]
    return _core.arrange(numels, [tensor.block for tensor in tensors], ranks, shard)


def test_10000_instances_are_the_same_in_cpp():
    draw = random.Random(0)
    fits = 0
    for _ in range(10_000):
        some = instance(draw)
        order = arrange(*some)
        assert core_arrange(*some) == order, some
        fits += len(order) > 1
    assert 1_000 < fits < 9_000


def test_what_it_returns_is_an_order_that_fits():
    draw = random.Random(1)
    for _ in range(2_000):
        tensors, ranks, shard = instance(draw)
        order = arrange(tensors, ranks, shard)
        if order:
            assert sorted(order) == list(range(len(tensors)))
            assert may_fit([tensors[i] for i in order], ranks, 1, shard, shard)


def test_each_tensor_needs_the_least_padding_of_those_that_are_left():
    tensors = [
        BlockedTensor(6, 6),
        BlockedTensor(5, 5),
        BlockedTensor(4, 4),
        BlockedTensor(3, 3),
        BlockedTensor(2, 1),
    ]
    order = arrange(tensors, 3, 7)
    assert order == [0, 4, 1, 2, 3]
    assert place([tensors[i] for i in order], 3, 7) == [0, 6, 8, 14, 18]


def test_what_fits_in_no_shard_is_refused():
    for tensors, ranks, shard in (
        ([BlockedTensor(9, 9)], 3, 8),
        ([BlockedTensor(4, 4), BlockedTensor(4, 4), BlockedTensor(4, 4)], 2, 5),
        ([BlockedTensor(5, 1), BlockedTensor(6, 1)], 2, 5),
    ):
        assert arrange(tensors, ranks, shard) == core_arrange(tensors, ranks, shard) == []


def test_sizes_near_the_end_of_int64_do_not_overflow():
    for tensors, ranks, shard in (
        ([BlockedTensor(2**62 - 1, 2**62 - 1), BlockedTensor(2**62 - 1, 7)], 2, 2**62 - 1),
        (
            [BlockedTensor(2**61, 3), BlockedTensor(2**61, 2**61), BlockedTensor(2**61 + 5, 5)],
            3,
            2**61 + 9,
        ),
        ([BlockedTensor(2**61, 2**61)] * 3, 2, 2**61),
        ([BlockedTensor(2**63 - 1, 1)], 1, 2**63 - 1),
    ):
        assert core_arrange(tensors, ranks, shard) == arrange(tensors, ranks, shard)
