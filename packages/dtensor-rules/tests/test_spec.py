"""Interned specs: one number for equal ones, and no number for one that has changed."""

import gc
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import dtensor_rules
from dtensor_rules import _core
from testkit import fake_mesh


@pytest.fixture
def mesh():
    with fake_mesh((2, 2)) as mesh, dtensor_rules.enabled():
        yield mesh


ROWS = (Shard(0), Replicate())


def spec(mesh, placements=ROWS, shape=(4, 4), dtype=torch.float32, **fields):
    stride = (shape[1], 1)
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, **fields)


def test_equal_specs_are_one(mesh):
    first, second = spec(mesh), spec(mesh)
    assert first is not second
    assert _core.spec_id(first) == _core.spec_id(second)
    assert _core.intern(second) is first


def test_whatever_tells_specs_apart_tells_their_numbers_apart(mesh):
    twice = (Shard(0), Shard(0))
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    different = [
        spec(mesh),
        spec(mesh, (Replicate(), Shard(0))),
        spec(mesh, shape=(4, 6)),
        spec(mesh, dtype=torch.bfloat16),
        spec(mesh, twice),
        spec(mesh, twice, shard_order=order),
        spec(mesh, (_StridedShard(0, split_factor=2), Shard(0))),
        spec(
            mesh,
            (_StridedShard(0, split_factor=2), Shard(0)),
            use_strided_shard_as_shard_order=False,
        ),
        spec(mesh, (_StridedShard(0, split_factor=4), Shard(0))),
        spec(init_device_mesh("cpu", (4, 1))),
    ]
    assert len({_core.spec_id(one) for one in different}) == len(different)


def test_another_world_has_other_numbers():
    ids = []
    for rank in (0, 1):
        with fake_mesh((2, 2), rank=rank) as mesh:
            ids.append(_core.spec_id(spec(mesh)))
    assert ids[0] != ids[1]


def test_a_rank_in_another_place_has_other_numbers():
    ids, groups = [], []
    for rank in (0, 1):
        with fake_mesh((2,), rank=rank) as mesh:
            meta = TensorMeta(torch.Size((4,)), (1,), torch.float32)
            ids.append(_core.spec_id(DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)))
            groups.append(mesh._dim_group_names)
    assert groups[0] == groups[1]
    assert ids[0] != ids[1]


def test_equal_meshes_over_other_groups_have_other_numbers(mesh):
    other = init_device_mesh("cpu", (2, 2))
    assert other == mesh
    assert other._dim_group_names != mesh._dim_group_names
    assert _core.spec_id(spec(other)) != _core.spec_id(spec(mesh))


def test_a_subclass_s_number_is_its_own(mesh):
    class Other(DTensorSpec):
        pass

    one = spec(mesh)
    other = Other(mesh, one.placements, tensor_meta=one.tensor_meta)
    assert one == other
    assert _core.spec_id(one) != _core.spec_id(other)


def test_a_spec_that_changes_is_another(mesh):
    one = spec(mesh)
    before = _core.spec_id(one)
    one.placements = (Replicate(), Replicate())
    assert _core.spec_id(one) not in (before, _core.spec_id(spec(mesh)))


def test_numbers_are_never_used_again(mesh):
    before = _core.spec_id(spec(mesh))
    again = spec(mesh)
    assert _core.spec_id(again) == before
    _core.clear_specs()
    assert _core.known_addresses() == _core.known_specs() == 0
    assert _core.spec_id(again) > before


def test_those_that_were_equal_to_one_that_changes_keep_their_meaning(mesh):
    one, other = spec(mesh), spec(mesh)
    assert _core.spec_id(one) == _core.spec_id(other)
    assert _core.intern(other) is one
    one.placements = (Replicate(), Replicate())
    assert _core.intern(other).placements == ROWS
    assert _core.intern(spec(mesh)).placements == ROWS


def test_a_forgotten_spec_is_not_kept_alive(mesh):
    one = spec(mesh)
    _core.spec_id(one)
    one.placements = (Replicate(), Replicate())
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_addresses_and_values_stay_bounded(mesh):
    for size in range(70_000):
        _core.spec_id(spec(mesh, shape=(size, 4)))
    gc.collect()
    assert _core.known_addresses() <= 1 << 15
    assert _core.known_specs() <= 1 << 16
