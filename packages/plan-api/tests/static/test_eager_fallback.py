"""Eager fallbacks: modules on DTensors while the rest of their model runs on local tensors."""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, generate_static, installed, parallelize
from plan_api.static.eager_fallback import widen_fallbacks
from testkit import CommLog, fake_mesh, run_ranks

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Mixing(nn.Module):
    """Its own code needs full rows between two operators, where no hook can gather them."""

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
    """Column- and row-parallel in the mixture, replicated elsewhere."""
    return (
        Plan(mesh)
        .shard("mix.up.weight", S0).shard("mix.up.bias", S0).shard("mix.scale", S0)
        .shard("mix.down.weight", S1)
        .shard("<in>", R)
    )  # fmt: skip


def plan_of(mesh):
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=R)
    return plan.redistribute("mix.<out>", P, R, grad_src=R, grad_dst=R)


def sharded_between(mesh):
    """Hidden states are sharded along the batch, and gathered for the mixture."""
    plan = weights(mesh).redistribute("first.<out>", R, S0, grad_src=S0, grad_dst=R)
    plan.redistribute("mix.<in>", S0, R, grad_src=P, grad_dst=S0)
    plan.redistribute("mix.<out>", P, S0, grad_src=S0, grad_dst=R)
    plan.redistribute("last.<in>", S0, R, grad_src=R, grad_dst=S0)
    return plan.annotate(r"norm\.(weight|bias)\.grad", P)


def reduced_before(mesh):
    """The gradient leaves the mixture as Partial; Eager's norm reduces it, with other bits."""
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=P)
    plan.redistribute("mix.<out>", P, R, grad_src=R, grad_dst=R)
    plan.redistribute("norm.<in>", R, R, grad_src=P, grad_dst=R)
    return plan.annotate(r"norm\.(weight|bias)\.grad", P)


def reduced_after(mesh):
    """The gradient enters the mixture as Partial."""
    plan = weights(mesh).redistribute("mix.<in>", R, R, grad_src=P, grad_dst=R)
    plan.shard(r"last\.(weight|bias)", S0)
    plan.redistribute("last.<out>", S1, R, grad_src=R, grad_dst=S1)
    return plan.redistribute("mix.<out>", P, R, grad_src=P, grad_dst=R)


PLANS = (plan_of, sharded_between, reduced_before, reduced_after)


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


def _train_as_in_eager(plan_of):
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
def test_fallbacks_train_bit_for_bit_as_in_eager(plan):
    run_ranks(_train_as_in_eager, 2, plan)


def _guard_refuses():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(Net(), plan_of(mesh), mode="static")
    with pytest.raises(ValueError, match="what is returned by mix"):
        model(torch.randn(6, 8))


def test_the_guard_refuses_the_same_plan_without_the_fallback():
    run_ranks(_guard_refuses, 2)


@contextmanager
def logged():
    """Collects the warnings of plan-api."""
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("plan_api").addHandler(handler)
    try:
        yield warnings
    finally:
        logging.getLogger("plan_api").removeHandler(handler)


def _generate():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = (
        Plan(mesh)
        .shard("mix.up.weight", S0).shard("mix.up.bias", S0).shard("mix.scale", S0)
        .shard("mix.down.weight", S1).shard("<in>", R).shard("mix.<out>", R)
    )  # fmt: skip
    with logged() as warnings:
        made = generate_static(plan, Net(), (torch.randn(6, 8),))
    wanted, _ = train(parallelize(Net(), plan))
    found, _ = train(parallelize(Net(), made, mode="static"))
    return str(made), warnings, list(map(torch.equal, wanted, found))


def test_generate_static_finds_the_fallback_and_reports_its_operator():
    for made, warnings, equal in run_ranks(_generate, 2):
        assert "eager('mix')" in made
        (warnings,) = warnings
        assert "mix runs on DTensors: on local tensors" in warnings
        assert (
            "aten.div of S(1) P, in mix, forward: DTensor sends all_reduce along 'tp'" in warnings
        )
        assert (
            "plan." not in warnings
        )  # gathering hidden states sends more than reducing the sums of their rows
        assert "move the operator into a module of its own" in warnings
        assert all(equal)


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


def test_a_fallback_of_the_whole_model_is_refused(mesh):
    with pytest.raises(ValueError, match=r"whole model on DTensors: use mode='eager'"):
        parallelize(Net(), plan_of(mesh).eager(""), mode="static")


def test_an_input_without_a_current_placement_is_refused(mesh):
    plan = plan_of(mesh).shard("mix.down.<in>", S1).eager("mix.down")
    with pytest.raises(
        ValueError,
        match=r"mix.down.<in:0>: expected its current placement.*redistribute\(path, src, dst\)",
    ):
        parallelize(Net(), plan, mode="static")


def test_a_parameter_tied_across_a_fallback_is_refused(mesh):
    model = Net()
    model.first.weight = nn.Parameter(torch.zeros(8, 8))
    model.mix.tied = model.first.weight
    with pytest.raises(ValueError, match=r"mix.tied is a DTensor .*, and is tied to first.weig"):
        parallelize(model, plan_of(mesh).eager("mix"), mode="static")


def test_a_fallback_inside_of_another_is_dropped(mesh):
    static = parallelize(Net(), plan_of(mesh).eager("mix.up").eager("mix"), mode="static")
    assert installed(static).lowered.eager == ("mix",)


def test_a_wider_fallback_replaces_those_inside_of_it():
    fallbacks = {r"attn\.norm": "first", "attn_norm": "another"}
    assert widen_fallbacks(fallbacks, "attn", "last") == {"attn_norm": "another", "attn": "first"}
    assert widen_fallbacks(fallbacks, "mlp", "last") == fallbacks | {"mlp": "last"}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.ones(2, 8), "expected example_inputs as a tuple .*, got a Tensor"),
        ({"y": torch.ones(2, 8)}, "forward of Net does not take these .*argument"),
        ((), "missing a required argument: 'x'"),
    ],
)
def test_example_inputs_that_the_model_does_not_take_are_refused(mesh, inputs, message):
    with CommLog() as log, pytest.raises(ValueError, match=message):
        generate_static(plan_of(mesh), Net(), inputs)
    log.assert_counts({})


def test_a_fallback_survives_json(mesh):
    plan = plan_of(mesh).eager("mix")
    assert "eager('mix')" in str(plan)
    assert str(Plan.from_json(plan.to_json(), mesh)) == str(plan)
