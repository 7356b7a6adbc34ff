"""A plan that asks for fully_shard, with the fsdp package: an unmodified LLaMA as on one device."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FSDPModule
from plan_api import deferred_init, parallelize, zoo
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks
from testkit.memory import peak_bytes

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]


def _plan(mesh):
    plan = zoo.llama(mesh, dp="dp", sp=mesh.size(1) > 1)
    return plan.fully_shard(r"model\.layers\.\d+", "dp", "rows(2)").fully_shard("", "dp")


@pytest.mark.parametrize("shape", [(2, 2), (2, 1)], ids=["FSDP x TP + SP", "FSDP"])
def test_it_trains_as_one_device(shape):
    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = models.llama()
        parallelize(model, _plan(mesh))
        assert isinstance(model.model.layers[0], FSDPModule)
        placed = [param.placements[0] for param in model.parameters()]
        assert all(isinstance(one, RaggedShard | StridedRaggedShard) for one in placed)
        return models.train(model, models.token_loss, steps=5)

    wanted = models.train(models.llama(), models.token_loss, steps=5)
    for losses in run_ranks(check, shape[0] * shape[1], timeout=180):
        assert losses == pytest.approx(wanted, abs=1e-5)


def test_a_deferred_model_is_never_whole_on_a_rank():
    """At 4 ranks: a quarter, and once more what is on its way from plan to buffer."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}

    def make():
        mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
        model = deferred_init(lambda: models.llama(**wide))
        return parallelize(model, _plan(mesh))

    def check():
        most, model = peak_bytes(make)
        # the bits of one device, whatever is random
        wanted = models.llama(**wide)
        for mine, other in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), other)
        sizes = [4 * param.numel() for param in wanted.parameters()]
        return most, sum(sizes), max(sizes)

    peaks, full, largest = zip(*run_ranks(check, 4, timeout=180), strict=True)
    assert full[0] / 4 <= min(peaks)
    assert max(peaks) < full[0] / 4 + 5 * largest[0] < full[0] / 2
