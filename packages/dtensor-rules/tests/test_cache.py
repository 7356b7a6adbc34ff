"""The cache of plans: what it holds, what it forgets, and that it says so."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dtensor_rules
from dtensor_rules import _core
from testkit import fake_mesh


@pytest.fixture
def mesh():
    capacity = _core.cache_info().capacity
    with fake_mesh((2,)) as mesh, dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        yield mesh
    dtensor_rules.set_cache_capacity(capacity)


def vector(mesh, size):
    return distribute_tensor(torch.ones(size), mesh, [Shard(0)], src_data_rank=None)


def counted(name):
    stats = dtensor_rules.stats()[name]
    return stats.cache, stats.miss


def test_a_second_call_is_a_hit_and_another_shape_is_not(mesh):
    for size in (4, 4, 6, 4):
        torch.neg(vector(mesh, size))
    assert counted("aten.neg.default") == (2, 2)
    info = dtensor_rules.cache_info()
    assert (info.size, info.evictions) == (2, 0)


def test_scalars_that_torch_ignores_are_in_the_key_with_their_type_only(mesh):
    x = vector(mesh, 4)
    for alpha in (1.0, 2.0, 3.0):
        assert torch.add(x, x, alpha=alpha).to_local()[0] == 1 + alpha
    assert counted("aten.add.Tensor") == (2, 1)
    assert torch.add(x, x, alpha=2).to_local()[0] == 3
    assert counted("aten.add.Tensor") == (2, 2)


def test_numbers_that_decide_the_result_are_in_the_key(mesh):
    x = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(0)])
    assert x[:, :2].shape == (2, 2)
    assert x[:, :3].shape == (2, 3)
    assert x.sum(0).shape == (4,)
    assert x.sum(1).shape == (2,)
    assert x.sum(0, keepdim=True).shape == (1, 4)


def test_a_wrapped_number_promotes_as_torch_promotes_it(mesh):
    x = distribute_tensor(torch.arange(4), mesh, [Shard(0)])
    wrapped, tensor = x * 2.5, x * torch.tensor(2.5, dtype=torch.float64)
    assert (wrapped.dtype, wrapped.to_local().dtype) == (torch.float32, torch.float32)
    assert (tensor.dtype, tensor.to_local().dtype) == (torch.float64, torch.float64)
    assert tensor._spec.tensor_meta.dtype == torch.float64


def test_the_least_recently_used_plan_makes_room(mesh):
    dtensor_rules.set_cache_capacity(3)
    tensors = {size: vector(mesh, size) for size in (2, 4, 6, 8)}
    dtensor_rules.cache_clear()
    for size in (2, 4, 6, 2, 8, 2):  # 2 was used again before 8 came
        torch.neg(tensors[size])
    assert counted("aten.neg.default") == (2, 4)
    info = dtensor_rules.cache_info()
    assert (info.size, info.capacity, info.evictions) == (3, 3, 1)


def test_the_newest_plans_are_the_last_to_make_room(mesh):
    dtensor_rules.set_cache_capacity(3)
    tensors = {size: vector(mesh, size) for size in (2, 4, 6, 8, 10, 12)}
    dtensor_rules.cache_clear()
    for size in (2, 4, 6, 8, 10, 12):
        torch.neg(tensors[size])
    dtensor_rules.stats_clear()
    for size in (8, 10, 12):
        torch.neg(tensors[size])
    assert counted("aten.neg.default") == (3, 0)


def test_hits_and_misses_are_counted_of_operators_and_of_methods(mesh):
    tensors = [vector(mesh, size) for size in (4, 6, 4)]
    calls = (
        torch.neg,
        torch.square,
        lambda x: x.redistribute(placements=[Replicate()]),
        lambda x: DTensor.from_local(x._local_tensor, mesh, [Shard(0)]),
    )
    for call in calls:
        dtensor_rules.cache_clear()
        for x in tensors:
            call(x)
        info = dtensor_rules.cache_info()
        assert (info.hits, info.misses, info.size) == (1, 2, 2)
    dtensor_rules.cache_clear()
    info = dtensor_rules.cache_info()
    assert (info.hits, info.misses, info.evictions) == (0, 0, 0)


def test_a_call_that_torch_refuses_leaves_no_plan(mesh):
    x, y = (distribute_tensor(torch.ones(4, size), mesh, [Shard(0)]) for size in (2, 3))
    before = dtensor_rules.cache_info().size
    for _ in range(2):
        with pytest.raises(RuntimeError):
            torch.mm(x, y)
    assert dtensor_rules.cache_info().size == before
    assert dtensor_rules.stats()["aten.mm.default"].fallthrough["propagation"] == 2


def test_a_smaller_capacity_takes_effect_at_once(mesh):
    for size in (2, 4, 6):
        torch.neg(vector(mesh, size))
    dtensor_rules.set_cache_capacity(1)
    assert dtensor_rules.cache_info().size == 1
    with pytest.raises(ValueError, match="plans=0 must be at least 1"):
        dtensor_rules.set_cache_capacity(0)


def test_a_clear_of_torchs_cache_is_one_of_ours(mesh):
    torch.neg(vector(mesh, 4))
    torch._C._clear_DTensor_sharding_propagator_cache()
    assert dtensor_rules.cache_info().size == 0
