"""Tensor parallelism inside: as on one device, and as FSDP2 does."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fsdp import Rows, fully_shard
from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit import CommLog, fake_mesh, run_ranks

pytestmark = pytest.mark.ranks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(Mlp(), Mlp())


def _train(model, rank, ranks):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(2, 4, 6)[rank::ranks].flatten(0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_it_trains_as_on_one_device():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _model()
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model[0].up.weight.placements[0], StridedRaggedShard)
        assert isinstance(model[0].down.weight.placements[0], RaggedShard)
        _train(model, mesh.get_local_rank("dp"), 2)
        alone = _model()
        _train(alone, 0, 1)
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), wanted, rtol=1e-4, atol=1e-5, msg=name)

    run_ranks(check, 4, timeout=120)


def test_meshes_that_have_nothing_in_common():
    def check():
        model = nn.Linear(4, 4)
        parallelize_module(model, init_device_mesh("cpu", (2,)), ColwiseParallel())
        with pytest.raises(ValueError, match=r"'weight' is a DTensor on axes \(\)"):
            fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

    run_ranks(check, 2)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=["sharded", "replicated"])
def test_parameters_that_are_placed_on_all_axes(placement):
    """As a plan over the whole mesh has them: gradients are what their placements say."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_module(_model(), mesh)  # replicated over all
        for block in model:
            weight = distribute_tensor(
                block.up.weight.detach().to_local(), mesh, [Replicate(), Shard(0)]
            )
            block.up.weight = nn.Parameter(weight)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        assert isinstance(model[0].up.weight.placements[0], StridedRaggedShard)
        alone = _model()
        for one in (model, alone):
            torch.manual_seed(0)
            x = torch.randn(4, 6)
            if one is model:
                x = distribute_tensor(x, mesh, [placement, Replicate()])
            one(x).square().mean().backward()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)

    run_ranks(check, 4, timeout=120)


def test_partial_gradients_are_reduced_once():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = distribute_module(_model(), mesh)
        for block in model:
            fully_shard(block, mesh=mesh, strategy="native")
        fully_shard(model, mesh=mesh, strategy="native")
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
        loss = model(x).square().sum().to_local()
        with CommLog() as log:
            loss.backward()
        log.assert_counts({"all_gather": 2, "reduce_scatter": 2})

    run_ranks(check, 2)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_parameters_may_be_sharded_before(placement):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model, wanted = nn.Linear(6, 5), nn.Linear(6, 5)
        model.weight = nn.Parameter(distribute_tensor(wanted.weight.detach(), mesh, [placement]))
        model.bias = nn.Parameter(distribute_tensor(wanted.bias.detach(), mesh, [Shard(0)]))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Rows(2))
        assert torch.equal(model.weight.full_tensor(), wanted.weight)
        assert torch.equal(model.bias.full_tensor(), wanted.bias)
        assert tuple(model.weight.to_local().shape) in ((2, 6), (3, 6), (4, 6), (1, 6))

    run_ranks(check, 2)


def test_rows_that_another_axis_cuts_stay_whole():
    """Then only dim 0 is ragged, and each rank has a matrix: operators need no other layout."""

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, wanted = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)
        weight = distribute_tensor(wanted.weight.detach(), mesh["tp"], [Shard(1)])
        model.weight = nn.Parameter(weight)
        fully_shard(model, mesh=mesh["dp"])
        assert model.weight.placements[0].dims == (0,)
        assert model.weight.to_local().shape[1] == 3
        assert torch.equal(model.weight.full_tensor(), wanted.weight)

    run_ranks(check, 4)


class Fused(nn.Module):
    """Its matrix makes two things at once, of which each rank of tp has its half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(8, 6))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_what_another_axis_interleaves_is_cut_within_its_part():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, wanted = Fused(), Fused().weight.detach()
        placed = distribute_tensor(wanted, mesh["tp"], [InterleavedShard(0, 2)])
        model.weight = nn.Parameter(placed)
        fully_shard(model, mesh=mesh["dp"])
        model.unshard()
        own = torch.cat([half.chunk(2)[mesh.get_local_rank("tp")] for half in wanted.chunk(2)])
        assert torch.equal(model.weight.to_local(), own)
        model.reshard()
        assert model.weight.to_local().numel() < own.numel()

    run_ranks(check, 4)


def test_an_axis_that_flattens_several_is_of_the_first():
    with fake_mesh((2, 1, 2), ("tp", "a", "b")) as mesh:
        model = distribute_module(_model(), mesh)
        with pytest.raises(ValueError, match=r"made of .*; wants these first in the mesh"):
            fully_shard(model, mesh=mesh["a", "b"]._flatten("data"))


def test_an_axis_that_flattens_several_of_a_parameters():
    """As a plan over the whole mesh has them; the other axis cuts the parameter, or there is none.

    Gradients are terms of a sum along the axes that are one, and are not averaged.
    """

    order = ("a", "b", "tp")

    def check():
        shape = [1 if name == "a" else 2 for name in order]
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=order)
        model, alone = distribute_module(_model(), mesh), _model()
        for block in model:
            placed = [Shard(0) if name == "tp" else Replicate() for name in order]
            weight = distribute_tensor(block.up.weight.detach().to_local(), mesh, placed)
            block.up.weight = nn.Parameter(weight)
        flat = mesh["a", "b"]._flatten("data")
        for block in model:
            fully_shard(block, mesh=flat)
        fully_shard(model, mesh=flat)
        up, down = model[0].up.weight, model[0].down.weight
        assert set(up.device_mesh.mesh_dim_names) == {"data", "tp"}
        assert up.to_local().numel() <= 24
        assert torch.equal(up.full_tensor(), alone[0].up.weight)
        assert torch.equal(down.full_tensor(), alone[0].down.weight)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        given = [Shard(0) if name == "b" else Replicate() for name in order]
        model(distribute_tensor(x, mesh, given)).square().mean().backward()
        alone(x).square().mean().backward()
        for (name, mine), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, msg=name)

    run_ranks(check, 4, timeout=120)
