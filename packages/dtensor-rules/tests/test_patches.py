"""Whoever changes torch's tables changes what the library does, from the next call on."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor_rules
from dtensor_rules import _core
from testkit import clear_caches

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


def world():
    """A mesh of two, in a fake process group that the test ends itself."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,), mesh_dim_names=("a",))


def shard_of(mesh):
    return DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])


def remembered():
    """How many plans, and specs by their addresses."""
    return dtensor_rules.cache_info().size, _core.known_addresses()


@pytest.fixture
def no_world_after():
    with dtensor_rules.enabled():
        yield
        if dist.is_initialized():
            dist.destroy_process_group()
        clear_caches()


@pytest.mark.usefixtures("no_world_after")
def test_what_is_remembered_of_a_world_ends_with_it():
    mesh = world()
    torch.neg(shard_of(mesh)).redistribute(placements=[Replicate()])
    assert all(remembered())
    dist.destroy_process_group()
    assert not any(remembered())
    next_mesh = world()
    assert next_mesh is not mesh
    assert torch.neg(shard_of(next_mesh)).device_mesh is next_mesh


@pytest.mark.usefixtures("no_world_after")
def test_what_is_remembered_of_a_group_ends_with_it():
    mesh = world()
    torch.neg(shard_of(mesh))
    assert all(remembered())
    dist.destroy_process_group(dist.new_group([0]))
    assert not any(remembered())
