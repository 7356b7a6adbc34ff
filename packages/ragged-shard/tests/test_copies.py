"""Copies of ragged tensors: deepcopy, pickle, torch.save and load, moving between dtypes."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

LAYOUTS = [
    ((2,), [RaggedShard((0,), (5, 7))]),
    ((2,), [RaggedShard.owned_by(1, 2)]),
    ((2,), [InterleavedShard(0, 3)]),
    ((1, 2), [StridedRaggedShard((0, 1), (1,), 2), Shard(0)]),
    ((1, 2), [Replicate(), RaggedShard((0, 1), (7, 89))]),
]


def value():
    return torch.arange(96.0).reshape(12, 8)


def through_torch(tensor, weights_only):
    buffer = io.BytesIO()
    torch.save({"weight": tensor}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)["weight"]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "torch.save": lambda tensor: through_torch(tensor, weights_only=False),
    "torch.save, weights only": lambda tensor: through_torch(tensor, weights_only=True),
    "detach and clone": lambda tensor: tensor.detach().clone(),
    "to and back": lambda tensor: tensor.to(torch.float64).to(torch.float32),
    "module": lambda tensor: copy.deepcopy(nn.ParameterList([nn.Parameter(tensor)]))[0].detach(),
}


def copied(name):
    for shape, placements in LAYOUTS:
        mesh = init_device_mesh("cpu", shape)
        tensor = distribute_tensor(value(), mesh, placements)
        with CommLog() as log:
            copied = COPIES[name](tensor)
        log.assert_counts({})
        assert type(copied) is DTensor
        assert copied.placements == tensor.placements == tuple(placements)
        tensor.to_local().zero_()
        assert_bitwise(copied.full_tensor(), value(), f"{name} {placements}")


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_placed_alike_and_has_its_own_memory(name):
    run_ranks(copied, 2, name)
