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


def beside_uneven_tensor_parallelism():
    """Seven rows are four and three, of which the ragged axis shards the first and the last."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    given, weight = operand()[:7], operand()[:8, :3].contiguous()
    placements = (StridedRaggedShard(ROWS, (3, 1), 2, 1), Shard(0))
    ragged = distribute_tensor(given, mesh, placements)
    replicated = [distribute_tensor(one, mesh, [R, R]) for one in (given, given[0], weight)]
    with CommLog() as log, ragged_shard.strict():
        results = {
            "sum": (ragged * 2 + ragged, given * 3),
            "row": (ragged * replicated[1], given * given[0]),
            "list": (torch._foreach_add([ragged], 1.0)[0], given + 1.0),
            "zeros": (torch.zeros_like(ragged), torch.zeros_like(given)),
            "over columns": (ragged.sum(1, keepdim=True), given.sum(1, keepdim=True)),
            "in place": (ragged.clone().mul_(ragged), given * given),
            "product": (ragged @ replicated[2], given @ weight),
            "a replicated tensor": (replicated[0] + ragged, given * 2),
        }
    log.assert_counts({})
    for name, (found, expected) in results.items():
        assert found.placements == placements, name
        assert_bitwise(found.full_tensor(), expected, name)


def test_operators_beside_uneven_tensor_parallelism():
    run_ranks(beside_uneven_tensor_parallelism, 4)
