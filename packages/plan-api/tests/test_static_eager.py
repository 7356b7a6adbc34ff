"""Modules that stay on DTensors while the rest of their model runs on local tensors."""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, generate_static, installed, parallelize
from plan_api.static.stays import widened
from testkit import CommLog, fake_mesh, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Mixing(nn.Module):
    """Its own code needs whole rows between two operators: no hook reaches there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16))
        self.register_buffer("shift", torch.ones(1))
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        hidden = self.up(x) * self.scale + self.shift
        return self.down(hidden / hidden.square().sum(-1, keepdim=True))


class Net(nn.Module):
    def __init__(self, residual=True):
        super().__init__()
        torch.manual_seed(0)
        self.residual = residual
        self.first, self.mix, self.last = nn.Linear(8, 8), Mixing(), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.first(x)
        mixed = self.mix(self.norm(x))
        return self.last(x + mixed if self.residual else mixed).square().mean()


def weights(mesh):
    """Column- and row-parallel in the mixture, whole elsewhere."""
    return (
        Plan(mesh)
        .shard("mix.up.weight", S0).shard("mix.up.bias", S0).shard("mix.scale", S0)
        .shard("mix.down.weight", S1)
        .shard("<in>", R)
    )  # fmt: skip


def plan_of(mesh):
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=R)
    return plan.redistribute("mix.<out>", P, R, grad_src=R, grad_dst=R)


def cut_between(mesh):
    """Hidden states are cut along the batch, which is gathered for the mixture."""
    plan = weights(mesh).redistribute("first.<out>", R, S0, grad_src=S0, grad_dst=R)
    plan.redistribute("mix.<in>", S0, R, grad_src=P, grad_dst=S0)
    plan.redistribute("mix.<out>", P, S0, grad_src=S0, grad_dst=R)
    plan.redistribute("last.<in>", S0, R, grad_src=R, grad_dst=S0)
    return plan.annotate(r"norm\.(weight|bias)\.grad", P)


def reduced_before(mesh):
    """The gradient leaves the mixture as a sum; Eager's norm reduces it, to other bits."""
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=P)
    plan.redistribute("mix.<out>", P, R, grad_src=R, grad_dst=R)
    plan.redistribute("norm.<in>", R, R, grad_src=P, grad_dst=R)
    return plan.annotate(r"norm\.(weight|bias)\.grad", P)


def reduced_after(mesh):
    """The gradient comes to the mixture as a sum."""
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=R)
    plan.shard(r"last\.(weight|bias)", S0)
    plan.redistribute("last.<out>", S1, R, grad_src=R, grad_dst=S1)
    return plan.redistribute("mix.<out>", P, R, grad_src=P, grad_dst=R)


PLANS = (plan_of, cut_between, reduced_before, reduced_after)


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(6, 8))
        loss.backward()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach().clone())
        assert all(
            isinstance(param.grad, DTensor) for param in model.parameters() if param.requires_grad
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.full_tensor() for name, param in model.named_parameters()}


def _trains_as_eager_does(plan_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Net(residual=plan_of is not reduced_after)
    plan = plan_of(mesh).eager("mix")
    wanted, of_eager = train(parallelize(copy.deepcopy(model), plan))
    static = parallelize(model, plan, mode="static")
    seen = {}
    for name in ("first", "norm", "mix.up", "last"):
        model.get_submodule(name).register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: type(out)})
        )
    found, of_static = train(static)
    assert seen == {name: DTensor if "mix" in name else torch.Tensor for name in seen}
    equal = torch.allclose if plan_of is reduced_before else torch.equal
    assert all(map(equal, wanted, found))
    assert all(equal(one, of_static[name]) for name, one in of_eager.items())
    assert plan_of is reduced_before or installed(static).check(torch.randn(6, 8)) == ()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_trains_as_eager_does(plan):
    run_ranks(_trains_as_eager_does, 2, plan)


def _is_refused_without():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(Net(), plan_of(mesh), mode="static")
    with pytest.raises(ValueError, match="what is returned by mix"):
        model(torch.randn(6, 8))


def test_is_refused_without():
    run_ranks(_is_refused_without, 2)


@contextmanager
def logged():
    """What plan-api warns of."""
    told = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("plan_api").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("plan_api").removeHandler(handler)


def _is_found_out():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = (
        Plan(mesh)
        .shard("mix.up.weight", S0).shard("mix.up.bias", S0).shard("mix.scale", S0)
        .shard("mix.down.weight", S1).shard("<in>", R).shard("mix.<out>", R)
    )  # fmt: skip
    with logged() as told:
        made = generate_static(plan, Net(), (torch.randn(6, 8),))
    wanted, _ = train(parallelize(Net(), plan))
    found, _ = train(parallelize(Net(), made, mode="static"))
    return str(made), told, list(map(torch.equal, wanted, found))


def test_is_found_out_and_reported_with_the_operator():
    for made, told, equal in run_ranks(_is_found_out, 2):
        assert "eager('mix')" in made
        (told,) = told
        assert "mix stays on DTensors: on local tensors" in told
        assert "aten.div of S(1) P, in mix, forward: DTensor sends all_reduce along 'tp'" in told
        assert "plan." not in told  # whole hidden states are more than the sums of their rows
        assert "move the operator into a module of its own" in told
        assert all(equal)


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


def test_the_whole_model_is_refused(mesh):
    with pytest.raises(ValueError, match=r"whole model is to stay .* use mode='eager'"):
        parallelize(Net(), plan_of(mesh).eager(""), mode="static")


def test_what_comes_has_to_be_said(mesh):
    plan = plan_of(mesh).shard("mix.down.<in>", S1).eager("mix.down")
    with pytest.raises(ValueError, match=r"mix.down.<in:0> is moved.* say what it is before"):
        parallelize(Net(), plan, mode="static")


def test_a_parameter_tied_to_one_that_does_not_stay_is_refused(mesh):
    model = Net()
    model.first.weight = nn.Parameter(torch.zeros(8, 8))
    model.mix.tied = model.first.weight
    with pytest.raises(ValueError, match=r"mix.tied stays on a DTensor, and is tied to first.weig"):
        parallelize(model, plan_of(mesh).eager("mix"), mode="static")


def test_one_inside_of_another_is_of_that_one(mesh):
    static = parallelize(Net(), plan_of(mesh).eager("mix.up").eager("mix"), mode="static")
    assert installed(static).lowered.eager == ("mix",)


def test_a_wider_module_takes_the_place_of_what_is_inside():
    staying = {r"attn\.norm": "first", "attn_norm": "another"}
    assert widened(staying, "attn", "last") == {"attn_norm": "another", "attn": "first"}
    assert widened(staying, "mlp", "last") == staying | {"mlp": "last"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.ones(2, 8), "example_inputs is a Tensor: give a tuple"),
        ({"y": torch.ones(2, 8)}, "forward of Net does not take these .*argument"),
        ((), "missing a required argument: 'x'"),
    ],
)
def test_example_inputs_that_the_model_does_not_take_are_refused(mesh, inputs, message):
    with CommLog() as log, pytest.raises(ValueError, match=message):
        generate_static(plan_of(mesh), Net(), inputs)
    log.assert_counts({})


def test_is_kept_as_text(mesh):
    plan = plan_of(mesh).eager("mix")
    assert "eager('mix')" in str(plan)
    assert str(Plan.from_json(plan.to_json(), mesh)) == str(plan)
