"""Random numbers for our placements: those that one device would have drawn, by way of dist-rng."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import assert_bitwise, each_rank

dist_rng = pytest.importorskip("dist_rng", reason="its entry points are tested where it is")

R = Replicate()
LAYOUTS = {
    "rows": ((2,), [RaggedShard((0,), (5, 7))]),
    "an empty shard": ((2,), [RaggedShard((0,), (0, 1))]),
    "elements": ((3,), [RaggedShard((0, 1), (7, 0, 89))]),
    "an owner": ((2,), [RaggedShard.owned_by(1, 2)]),
    "interleaved": ((2,), [InterleavedShard(0, 3)]),
    "interleaved unevenly": ((3,), [InterleavedShard(1, 2)]),
    "hybrid": ((2, 2), [R, RaggedShard((0,), (1, 3))]),
    "strided": ((2, 2), [StridedRaggedShard((0,), (1, 5), 2), Shard(0)]),
    "over columns": ((2, 2), [RaggedShard((0, 1), (1, 2)), Shard(1)]),
    "over interleaved": ((2, 2), [RaggedShard((0,), (1, 2)), InterleavedShard(0, 3)]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_draws_its_part_of_one_devices_numbers(name):
    mesh_shape, placements = LAYOUTS[name]
    torch.manual_seed(7)
    whole = torch.empty(12, 8).normal_().uniform_()
    state = torch.get_rng_state()
    dist_rng.install()
    try:
        for _rank, mesh in each_rank(mesh_shape):
            expected = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            drawn = torch.zeros_like(expected)
            torch.manual_seed(7)
            drawn.normal_().uniform_()
            assert drawn.placements == tuple(placements)
            assert_bitwise(drawn.to_local(), expected.to_local(), name)
            assert torch.equal(torch.get_rng_state(), state)
            torch.manual_seed(7)
            torch.nn.init.normal_(drawn)
            torch.nn.functional.dropout(drawn, 0.5)
    finally:
        dist_rng.uninstall()
