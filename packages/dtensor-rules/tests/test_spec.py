"""Interned specs: one number for equal ones, and no number for one that has changed."""

import gc

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


def spec(mesh, placements=(Shard(0), Replicate()), shape=(4, 4), dtype=torch.float32, **fields):
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


def test_a_spec_that_changes_is_another(mesh):
    one = spec(mesh)
    before = _core.spec_id(one)
    one.placements = (Replicate(), Replicate())
    assert _core.spec_id(one) not in (before, _core.spec_id(spec(mesh)))


def test_numbers_are_never_used_again(mesh):
    before = _core.spec_id(spec(mesh))
    _core.clear_specs()
    assert _core.spec_id(spec(mesh)) > before


def test_addresses_and_values_stay_bounded(mesh):
    for size in range(40_000):
        _core.spec_id(spec(mesh, shape=(size, 4)))
    gc.collect()
    assert _core.known_addresses() <= 1 << 15
    assert _core.known_specs() <= 1 << 17
