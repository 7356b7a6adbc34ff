"""Local parameters and their gradients in static mode, bit for bit as in Eager."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, deferred_init, installed, parallelize
from testkit import fake_mesh, run_ranks
from testkit.models import TwoLinears

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


class Net(TwoLinears):
    """Two Linears, column- and row-parallel, a tied head, and buffers."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(1, 2, 4))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count = self.count + 1
        x = self.table(x)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale
        return self.head(x).square().mean()


def _plan(mesh, model_axis="tp"):
    plan = Plan(mesh)
    plan.redistribute("<in>", R, S0, "dp")
    plan.redistribute("<out>", Partial("avg"), R, "dp", grad_src=R)
    plan.annotate(r".*\.grad", P, "dp")
    plan.shard(r"up\.(weight|bias)", S0, model_axis)
    plan.shard(r"down\.weight", S1, model_axis)
    plan.redistribute(r"down\.bias", R, P, model_axis)
    plan.redistribute("up.<in>", R, R, model_axis, grad_src=P, grad_dst=R)
    return plan.redistribute("down.<out>", P, R, model_axis)


def _net(mesh, mode="static", change=None):
    model = Net()
    if change is not None:
        change(model)
    # Nothing is sent: torch 2.11's fake group leaves what it scatters as it was allocated.
    return parallelize(model, _plan(mesh), mode=mode, src_data_rank=None)


def _batch(seed=0):
    torch.manual_seed(seed)
    return torch.randn(4, 4)


def _grads(model):
    return {
        name: None if param.grad is None else param.grad.full_tensor()
        for name, param in model.named_parameters()
    }


def _mesh():
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture
def mesh():
    with fake_mesh((1, 1), ("dp", "tp")) as mesh:
        yield mesh


def _different(one, other):
    """Returns the names of the tensors by which two dicts differ."""
    assert one.keys() == other.keys()
    return [
        name
        for name, left in one.items()
        if (left is None) != (other[name] is None)
        or (left is not None and not torch.equal(left, other[name]))
    ]


# Local parameters


def test_parameters_are_dtensors_to_optimizers_and_plain_tensors_to_modules(mesh):
    model = _net(mesh)
    named = dict(model.named_parameters())
    assert all(isinstance(param, DTensor) for param in named.values())
    assert isinstance(named["up.weight"], DTensor)
    assert type(model.up.weight) is torch.Tensor
    assert model.up.weight.data_ptr() == named["up.weight"]._local_tensor.data_ptr()
    assert all(isinstance(one, DTensor) for name, one in model.state_dict().items() if "." in name)
    assert sorted(model.state_dict()) == sorted(Net().state_dict())


def test_tied_parameters_have_one_local_parameter(mesh):
    model = _net(mesh)
    assert model.head.weight is model.table.weight
    model(_batch()).backward()
    plain = Net()
    plain(_batch()).backward()
    assert torch.allclose(_grads(model)["table.weight"], plain.table.weight.grad, atol=1e-6)


def test_forward_uses_a_loaded_state(mesh):
    model, other = _net(mesh), _net(mesh)
    with torch.no_grad():
        for param in other.parameters():
            param._local_tensor.mul_(2)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(_batch()), other(_batch()))


def test_replaced_parameters_are_used_and_get_gradients(mesh):
    model, other = _net(mesh, change=_untie), _net(mesh, change=_untie)
    model(_batch()).backward()  # buckets of gradients are planned
    with torch.no_grad():
        for param in other.parameters():
            param._local_tensor.mul_(2)
    before = dict(model.named_parameters())["up.weight"]
    model.load_state_dict(other.state_dict(), assign=True)
    assert dict(model.named_parameters())["up.weight"] is not before
    assert torch.equal(model(_batch()), other(_batch()))
    for one in (model, other):
        one.zero_grad()
        one(_batch()).backward()
    assert all(one is not None for one in _grads(model).values())
    assert _different(_grads(model), _grads(other)) == []


def _untie(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def test_parameters_that_are_no_longer_tied_are_refused(mesh):
    model = _net(mesh)
    model.load_state_dict(_net(mesh).state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"table.weight was tied .*load without assign"):
        model(_batch())


def test_the_next_forward_uses_another_dtype(mesh):
    model = _net(mesh)
    model(_batch()).backward()
    model.zero_grad()
    model.to(torch.float64)
    loss = model(_batch().double())
    assert loss.dtype == torch.float64
    loss.backward()
    assert dict(model.named_parameters())["up.weight"].grad.dtype == torch.float64
    assert torch.allclose(
        _grads(model)["down.weight"], _expected_grad("down.weight").double(), atol=1e-6
    )


def _expected_grad(name):
    plain = Net()
    plain(_batch()).backward()
    return dict(plain.named_parameters())[name].grad


def test_frozen_parameters_get_no_gradient_and_are_not_updated(mesh):
    model = _net(mesh, change=lambda one: one.up.requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = dict(model.named_parameters())["up.weight"].full_tensor().clone()
    model(_batch()).backward()
    optimizer.step()
    after = dict(model.named_parameters())["up.weight"]
    assert after.grad is None
    assert torch.equal(after.full_tensor(), before)
    assert dict(model.named_parameters())["down.weight"].grad is not None


def test_parameters_may_be_frozen_and_unfrozen_later(mesh):
    model = _net(mesh)
    up = dict(model.named_parameters())["up.weight"]
    up.requires_grad_(False)
    model(_batch()).backward()
    assert up.grad is None
    up.requires_grad_(True)
    model.zero_grad()
    model(_batch()).backward()
    assert torch.allclose(up.grad.full_tensor(), _expected_grad("up.weight"), atol=1e-6)


def test_modules_may_replace_replicated_buffers(mesh):
    model = _net(mesh)
    model(_batch())
    model(_batch())
    assert model.count == 2
    assert model.state_dict()["count"] == 2


@pytest.mark.ranks
def test_parameters_are_initialised_as_in_eager_by_deferred_init_and_on_meta():
    """Initialisers of a model on meta find parameters, as nothing is computed yet."""

    def on_meta(mesh, mode):
        with torch.device("meta"):
            model = Net()
        parallelize(model, _plan(mesh), mode=mode)
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        for module in (model.up, model.down, model.table):
            module.reset_parameters()
        with torch.no_grad():
            model.scale.fill_(1.5)
            model.count.zero_()
        return model

    def deferred(mesh, mode):
        torch.manual_seed(1)
        return parallelize(deferred_init(Net), _plan(mesh), mode=mode)

    def check():
        mesh = _mesh()
        found = {}
        for make in (on_meta, deferred):
            models = [make(mesh, mode) for mode in ("eager", "static")]
            full = [{n: p.full_tensor() for n, p in one.named_parameters()} for one in models]
            for _ in range(2):
                for model in models:
                    model(_batch()).backward()
            found[make.__name__] = _different(*full), _different(*map(_grads, models))
        return found

    assert run_ranks(check, 2) == [{"on_meta": ([], []), "deferred": ([], [])}] * 2


# Gradients


@pytest.mark.ranks
def test_gradients_equal_eager_however_they_are_accumulated():
    """Over two backwards, under no_sync, zeroed or set to None, clipped by foreach or not."""

    def twice(model):
        model(_batch(1)).backward()
        model(_batch(2)).backward()

    def without_sync(model):
        with installed(model).gradients.no_sync():
            model(_batch(1)).backward()
        model(_batch(2)).backward()

    def to_zero(model):
        model(_batch(1)).backward()
        model.zero_grad(set_to_none=False)
        model(_batch(2)).backward()

    def to_none(model):
        model(_batch(1)).backward()
        model.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        model(_batch(2)).backward()

    def clipped(model, foreach):
        model(_batch(1)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        assert norm.full_tensor() > 0.1

    patterns = {
        "twice": twice,
        "no_sync": without_sync,
        "zero": to_zero,
        "none": to_none,
        "foreach": lambda model: clipped(model, True),
        "one by one": lambda model: clipped(model, False),
    }

    def check():
        found = {}
        for shape in ((1, 2), (2, 1)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            for name, run in patterns.items():
                models = [_net(mesh, mode) for mode in ("eager", "static")]
                for model in models:
                    run(model)
                found[shape, name] = _different(*map(_grads, models))
        return found

    for found in run_ranks(check, 2, timeout=120):
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.ranks
def test_gradients_equal_one_device():
    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = _net(mesh)
        loss = model(_batch())
        loss.backward()
        return loss.item(), _grads(model)

    plain = Net()
    loss = plain(_batch())
    loss.backward()
    for found, grads in run_ranks(check, 4):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        for name, grad in grads.items():
            expected = dict(plain.named_parameters())[name].grad
            assert torch.allclose(grad, expected, rtol=1e-5, atol=1e-7), name
