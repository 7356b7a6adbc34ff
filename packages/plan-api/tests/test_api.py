"""A plan applied to a model."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from plan_api import Plan, explain, installed, options, parallelize
from testkit import CommLog, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def tensor_parallel(mesh):
    return (
        Plan(mesh)
        .shard(r"layers\.\d\.up\.(weight|bias)", S0, "tp")
        .shard(r"layers\.\d\.down\.weight", S1, "tp")
        .shard(r"layers\.\d.<in>", R, "tp")
        .shard(r"layers\.\d.<out>", R, "tp")
        .shard("<in>", S0, "dp")
    )


def test_parameters_and_buffers_become_dtensors_under_their_names(mesh, model):
    before = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    model.layers[1].down.weight.requires_grad_(False)
    with CommLog() as log:
        assert parallelize(model, tensor_parallel(mesh), src_data_rank=None) is model
    assert set(log.counts()) == {"all_reduce"}  # whether the ranks mean the same
    assert [name for name, _ in model.named_parameters()] == names
    for name, param in model.named_parameters():
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, DTensor)
        assert param.requires_grad == (name != "layers.1.down.weight")
    up, down = model.layers[0].up.weight, model.layers[0].down.weight
    assert (up.placements, down.placements) == ((R, S0), (R, S1))
    assert torch.equal(up.to_local(), before.layers[0].up.weight[:4])
    assert torch.equal(down.to_local(), before.layers[0].down.weight[:, :4])
    assert model.layers[0].scale.placements == (R, R)
    assert list(model.state_dict()) == list(before.state_dict())


def test_tied_parameters_stay_tied(mesh, model):
    parallelize(model, tensor_parallel(mesh))
    assert model.layers[0].up.weight is model.layers[2].up.weight


def test_a_plan_that_names_one_of_two_tied_names_places_both(mesh, model):
    parallelize(model, Plan(mesh).shard(r"layers\.2\.up\.weight", S0, "tp"))
    assert model.layers[0].up.weight.placements == (R, S0)


def test_a_model_on_meta_stays_there(mesh):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    parallelize(model, Plan(mesh).shard("weight", S0, "tp"))
    assert model.weight.device.type == "meta"
    assert model.weight._local_tensor.shape == (2, 4)


def test_cover_lists_parameters_without_an_entry(mesh, model):
    plan = Plan(mesh, cover=True) | tensor_parallel(mesh)
    with pytest.raises(ValueError, match=r"got none for: layers.0.down.bias, layers.1.down.b"):
        parallelize(model, plan)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    parallelize(model, plan.shard(r".*\.down\.bias", R, "tp"))


def test_a_model_is_parallelized_once(mesh, model):
    with pytest.raises(ValueError, match="this Model was not parallelized"):
        installed(model)
    parallelize(model, tensor_parallel(mesh))
    with pytest.raises(ValueError, match="this Model has been parallelized already"):
        parallelize(model, tensor_parallel(mesh))


def test_dtensors_are_not_placed_again(mesh, model):
    placed = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [S0, R], src_data_rank=None))
    model.layers[1].up.weight = placed
    parallelize(model, tensor_parallel(mesh))
    assert model.layers[1].up.weight is placed


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_reduced_whatever_part_of_the_model_was_called(
    mesh, model, monkeypatch, fused
):
    monkeypatch.setattr(options, "find_spec", lambda name: fused and name == "fused_comm")
    parallelize(model, tensor_parallel(mesh))
    x = distribute_tensor(torch.ones(4, 4), mesh, [S0, R], src_data_rank=None)
    with contextlib.nullcontext() if fused else pytest.warns(UserWarning, match="one by one"):
        model.layers[1](x).sum().backward()
    grads = {name: p.grad for name, p in model.layers[1].named_parameters()}
    assert {name: grad.placements for name, grad in grads.items()} == {
        name: p.placements for name, p in model.layers[1].named_parameters()
    }


def test_a_model_on_meta_is_materialised_and_trained(mesh):
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    plan = Plan(mesh).shard("weight", S0, "tp").shard("<in>", S0, "dp")
    parallelize(model, plan).to_empty(device="cpu")
    for param in model.parameters():
        nn.init.ones_(param)
    model(torch.ones(4, 4)).sum().backward()
    assert model.weight.grad.placements == model.weight.placements == (R, S0)
    assert model.bias.grad.placements == (R, R)


def test_overrides_are_logged(mesh, model, caplog):
    plan = tensor_parallel(mesh).shard("layers.1.up.weight", S1, "tp")
    with caplog.at_level(logging.WARNING, "plan_api"):
        parallelize(model, plan)
    assert "layers.1.up.init:weight:0:shard(->S(0), tp) is overridden by" in caplog.text
    assert model.layers[1].up.weight.placements == (R, S1)


def test_unused_sites_are_logged_once(mesh, model, caplog):
    class Unused(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.extra = model, nn.Linear(4, 4)

        def forward(self, x):
            return self.model(x)

    model = Unused(model)
    plan = tensor_parallel(mesh).under("model").shard("extra.<in>", R, "tp")
    parallelize(model, plan)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "plan_api"):
            model(torch.ones(4, 4)).sum().backward()
    assert caplog.text.count("did not run these sites of the plan: extra.forward_pre") == 1
    assert [site.path for site in installed(model).coverage.unused_sites] == ["extra"]


def test_removed_hooks_do_nothing_more(mesh, model):
    parallelize(model, tensor_parallel(mesh))
    assert isinstance(model(torch.ones(4, 4)), DTensor)
    installed(model).remove()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model(torch.ones(4, 4))


@pytest.mark.ranks
def test_plans_that_differ_are_an_error_on_every_rank():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        odd = torch.distributed.get_rank() == 3
        model = nn.Linear(4, 4)
        plan = Plan(mesh).shard("weight", S1 if odd else S0, "tp")
        with pytest.raises(ValueError, match=r"operation 1 is init:weight.*->S\(0\).*->S\(1\)"):
            parallelize(model, plan)
        return isinstance(model.weight, DTensor)

    assert run_ranks(check, 4) == [False] * 4


@pytest.mark.ranks
def test_a_rank_outside_the_mesh_is_an_error_and_no_other_rank_waits():
    """The plan is of ranks 0 and 1 of 3; the third may explain it."""

    def check():
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        model = nn.Sequential(nn.Linear(4, 4))
        plan = Plan(mesh).shard("<in>", R).shard(r"0\.weight", S0)
        message = [row.after for row in explain(plan, model).rows]
        if mesh.get_coordinate() is None:
            with (
                CommLog() as log,
                pytest.raises(ValueError, match=r"has ranks \[0, 1\], got rank 2"),
            ):
                parallelize(model, plan)
            return message, sum(log.counts().values()), type(model[0].weight) is nn.Parameter
        return message, parallelize(model, plan)(torch.ones(2, 4)).shape, model[0].weight.placements

    *inside, outside = run_ranks(check, 3)
    assert inside == [(["tp=R", "tp=S(0)"], (2, 4), (S0,))] * 2
    assert outside == (["tp=R", "tp=S(0)"], 0, True)


@pytest.mark.ranks
def test_all_ranks_get_the_parameters_of_the_first_rank():
    def check():
        torch.manual_seed(torch.distributed.get_rank())
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4, 4)
        parallelize(model, Plan(mesh).shard("weight", S0))
        return model.weight.full_tensor().detach(), model.bias.full_tensor().detach()

    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    for weight, bias in run_ranks(check, 2):
        assert torch.equal(weight, expected.weight)
        assert torch.equal(bias, expected.bias)


@pytest.mark.ranks
def test_gradients_match_one_device_in_any_placements():
    """Of a sharded weight whose outputs are summed, backward makes the whole gradient on tp."""

    def check():
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, x = nn.Linear(4, 6), torch.randn(8, 4)
        expected = copy.deepcopy(model)
        expected(x).sum().backward()
        plan = Plan(mesh).shard("weight", S0, "tp").shard("<in>", S0, "dp")
        parallelize(model, plan)
        model(x).sum().backward()
        return [
            (
                actual.grad.placements == actual.placements,
                torch.allclose(actual.grad.full_tensor(), native.grad),
            )
            for actual, native in zip(model.parameters(), expected.parameters(), strict=True)
        ]

    assert run_ranks(check, 4) == [[(True, True)] * 2] * 4
