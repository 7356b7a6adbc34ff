"""Whoever changes torch's tables changes what the library does, from the next call on."""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import dtensor_rules

NAME = "dtensor_rules_tests::scale"
torch.library.define(NAME, "(Tensor x, float by, *, Tensor? bias=None) -> Tensor")


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _scale(x, by, *, bias=None):
    return x * by if bias is None else x * by + bias


@torch.library.register_fake(NAME)
def _scale_fake(x, by, *, bias=None):
    return torch.empty_like(x)


scale = torch.ops.dtensor_rules_tests.scale.default


def sharded_on(dim):
    def sharding(x, by, *, bias=None):
        whole = ([Replicate()], [Replicate(), None, None if bias is None else Replicate()])
        cut = ([Shard(dim)], [Shard(dim), None, None if bias is None else Shard(dim)])
        return [whole, cut]

    return sharding


def counted():
    stats = dtensor_rules.stats()["dtensor_rules_tests.scale.default"]
    return stats.cache, stats.miss, stats.fallthrough


def test_a_custom_operator_goes_through_the_cache_keyword_tensors_included(x):
    register_sharding(scale)(sharded_on(0))
    for by in (2.0, 3.0):
        assert torch.equal(scale(x, by).to_local(), x.to_local() * by)
    assert counted() == (1, 1, {})
    for _ in range(2):
        result = scale(x, 2.0, bias=x)
    assert torch.equal(result.to_local(), x.to_local() * 3)
    assert counted() == (2, 2, {})


def test_a_new_registration_takes_effect(x):
    register_sharding(scale)(sharded_on(0))
    assert scale(x, 2.0).placements == (Shard(0),)
    register_sharding(scale)(sharded_on(1))
    assert scale(x, 2.0).placements != (Shard(0),)


def test_a_handler_that_comes_later_is_asked(x):
    handlers = DTensor._op_dispatcher._custom_op_handlers
    torch.neg(x)
    handlers[torch.ops.aten.neg.default] = lambda op, args, kwargs: args[0]
    try:
        for _ in range(2):
            assert torch.neg(x) is x
        assert dtensor_rules.stats()["aten.neg.default"].fallthrough == {"handler": 2}
    finally:
        del handlers[torch.ops.aten.neg.default]
    assert isinstance(torch.neg(x), DTensor)


def test_a_strategy_put_into_the_table_by_hand_is_seen(x):
    table = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    torch.neg(x)
    assert dtensor_rules.cache_info().size == 1
    table[scale] = next(iter(table.values()))
    try:
        torch.abs(x)
        assert dtensor_rules.cache_info().size == 1  # neg's plan is gone
    finally:
        del table[scale]
