"""Rules of this package for one axis, combined with torch's for the others."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_bitwise, assert_close, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
ROWS, ELEMENTS = (0,), (0, 1)


def operand(dtype=torch.float32):
    return ((torch.arange(96).reshape(12, 8) * 37) % 17 - 8).to(dtype)


def beside_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    layouts = [
        (StridedRaggedShard(ROWS, (1, 5), 2), Shard(0)),
        (RaggedShard(ELEMENTS, (1, 2)), Shard(1)),
        (R, RaggedShard(ROWS, (5, 7))),
    ]
    for placements in layouts:
        ragged = distribute_tensor(operand(), mesh, placements)
        with CommLog() as log, ragged_shard.strict():
            doubled = ragged * 2 + ragged
            total, largest = ragged.sum(), ragged.max()
            norm = torch.linalg.vector_norm(ragged)
        log.assert_counts({})
        assert doubled.placements == tuple(placements)
        assert_bitwise(doubled.full_tensor(), operand() * 3, f"{placements}")
        assert_bitwise(total.full_tensor(), operand().sum(), "sum")
        assert_bitwise(largest.full_tensor(), operand().max(), "max")
        assert_close(norm.full_tensor(), operand().norm(), rtol=1e-6, atol=0, what="norm")


def test_operators_beside_tensor_parallelism():
    run_ranks(beside_tensor_parallelism, 4)
