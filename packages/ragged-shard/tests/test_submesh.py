"""Tensors on one axis of a larger mesh, and on several flattened into one."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard
from testkit import assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

ROWS = RaggedShard((0,), (5, 7))


def value():
    return torch.arange(96.0).reshape(12, 8)


def on_parts_of_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        submesh = mesh[name]
        ragged = distribute_tensor(value(), submesh, [ROWS])
        for target in (RaggedShard((0, 1), (1, 1)), RaggedShard.owned_by(1, 2), Shard(1),
                       InterleavedShard(0, 3)):  # fmt: skip
            moved = ragged.redistribute(placements=[target])
            assert_bitwise(moved.full_tensor(), value(), f"{name} {target}")
        partial = DTensor.from_local(value(), submesh, [Partial()])
        reduced = partial.redistribute(placements=[ROWS])
        assert_bitwise(reduced.full_tensor(), 2 * value(), f"{name} sum")
    flat = mesh._flatten("all")
    ragged = distribute_tensor(value(), flat, [RaggedShard((0,), (1, 2, 0, 3))])
    assert_bitwise((ragged * 2).full_tensor(), 2 * value(), "flattened")


def test_an_axis_of_a_larger_mesh_and_axes_made_one():
    run_ranks(on_parts_of_a_mesh, 4)
