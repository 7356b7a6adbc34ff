"""Optimizers in static mode step on local parameters, and hold DTensors before and after."""

import copy
import gc
import weakref
from collections import defaultdict

import pytest
import torch
from torch import optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Plan, parallelize
from testkit import fake_mesh, run_ranks
from testkit.inspection.dtensor_operators import DTensorOperators
from testkit.models import TwoLinears

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)

OPTIMIZERS = {
    "adamw": (optim.AdamW, {}),
    "adamw, one by one": (optim.AdamW, {"foreach": False}),
    "adamw, foreach": (optim.AdamW, {"foreach": True}),
    "adamw, amsgrad": (optim.AdamW, {"amsgrad": True}),
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd, foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "adam, capturable off": (optim.Adam, {"weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"centered": True}),
    "adagrad": (optim.Adagrad, {}),
}
FUSED = {
    "adamw, fused": (optim.AdamW, {"fused": True}),
    "sgd, fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


def _net(mesh, mode="static"):
    plan = Plan(mesh).shard(r"up\.(weight|bias)", S0).shard(r"down\.weight", S1)
    plan.redistribute("<in>", R, R).redistribute(r"down\.bias", R, P)
    plan.redistribute("up.<in>", R, R, grad_src=P, grad_dst=R)
    plan.redistribute("down.<out>", P, R)
    # Nothing is sent: torch 2.11's fake group does not write what it scatters.
    return parallelize(TwoLinears(), plan, mode=mode, src_data_rank=None)


def _step(model, optimizer, seed):
    torch.manual_seed(seed)
    model(torch.randn(4, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _full(model):
    return {name: param.full_tensor() for name, param in model.named_parameters()}


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.fixture
def mesh():
    with fake_mesh((1,), ("tp",)) as mesh:
        yield mesh


@pytest.mark.ranks
def test_elementwise_optimizers_equal_eager_bit_for_bit_without_dtensors():
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for name, (kind, options) in OPTIMIZERS.items():
            ends = []
            for mode in ("eager", "static"):
                model = _net(mesh, mode)
                optimizer = kind(model.parameters(), **options)
                for seed in range(4):
                    _step(model, optimizer, seed)
                saved = optimizer.state_dict()["state"]
                with DTensorOperators() as seen:
                    optimizer.step()
                state = {
                    (number, key): one.full_tensor() if isinstance(one, DTensor) else one
                    for number, of_one in saved.items()
                    for key, one in of_one.items()
                    if isinstance(one, torch.Tensor)
                }
                are_dtensors = [isinstance(p, DTensor) for p in optimizer.param_groups[0]["params"]]
                ends.append((_full(model), state, seen.counts.total(), all(are_dtensors)))
            (eager, states, _, _), (static, own, count, dtensors) = ends
            found[name] = (_equal(eager, static), _equal(states, own), count == 0, dtensors)
        return found

    for found in run_ranks(check, 2, timeout=200):
        assert {name: facts for name, facts in found.items() if not all(facts)} == {}
        assert len(found) == len(OPTIMIZERS)


@pytest.mark.ranks
def test_fused_kernels_run_on_local_parameters():
    """In Eager they need DTensor strategies, which some have; here they take plain tensors."""

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = {}
        for name, (kind, options) in FUSED.items():
            model, plain = _net(mesh), TwoLinears()
            optimizer = kind(model.parameters(), **options)
            reference = kind(plain.parameters(), **options)
            for seed in range(4):
                _step(model, optimizer, seed)
                _step(plain, reference, seed)
            expected = {key: one.detach() for key, one in plain.named_parameters()}
            found[name] = all(
                torch.allclose(one, expected[key], atol=1e-6) for key, one in _full(model).items()
            )
        return found

    assert run_ranks(check, 2) == [dict.fromkeys(FUSED, True)] * 2


@pytest.mark.ranks
def test_an_optimizer_that_reads_full_matrices_steps_on_dtensors():
    """Muon on shards would compute something else."""

    def trained(model):
        optimizer = optim.Muon([param for param in model.parameters() if param.ndim == 2], lr=0.1)
        for seed in range(3):
            _step(model, optimizer, seed)
        return model

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        eager, static = (_full(trained(_net(mesh, mode))) for mode in ("eager", "static"))
        plain = dict(trained(TwoLinears()).named_parameters())
        different = [key for key in plain if not torch.allclose(static[key], plain[key], atol=1e-2)]
        return _equal(eager, static), different

    assert run_ranks(check, 2) == [(True, [])] * 2


def test_a_subclass_of_an_elementwise_optimizer_steps_on_dtensors(mesh):
    seen = []

    class Mine(optim.SGD):
        def step(self, closure=None):
            seen.extend(type(param) for param in self.param_groups[0]["params"])
            return super().step(closure)

    model = _net(mesh)
    _step(model, Mine(model.parameters(), lr=0.1), 0)
    assert all(issubclass(kind, DTensor) for kind in seen)


def test_state_dicts_hold_dtensors_and_load(mesh):
    model = _net(mesh)
    optimizer = optim.AdamW(model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed)
    saved_model = {key: one.clone() for key, one in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    moments = [saved["state"][0][key] for key in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(one, DTensor) for one in moments)
    assert moments[0].placements == (S0,)
    assert type(saved["state"][0]["step"]) is torch.Tensor
    again = _net(mesh)
    again.load_state_dict(saved_model)
    other = optim.AdamW(again.parameters())
    other.load_state_dict(saved)
    for one, its in ((model, optimizer), (again, other)):
        _step(one, its, 9)
    assert _equal(_full(model), _full(again))


def test_a_closure_runs_backward_inside_of_the_step(mesh):
    ends = []
    for mode in ("eager", "static"):
        model = _net(mesh, mode)
        optimizer = optim.AdamW(model.parameters())

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            torch.manual_seed(4)
            loss = model(torch.randn(4, 4))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        ends.append((losses, _full(model)))
    assert ends[0][0] == ends[1][0]
    assert ends[1][0][2] < ends[1][0][0]
    assert _equal(ends[0][1], ends[1][1])


def test_each_group_has_its_options(mesh):
    ends = []
    for mode in ("eager", "static"):
        model = _net(mesh, mode)
        up, down = ([p for n, p in model.named_parameters() if key in n] for key in ("up", "down"))
        optimizer = optim.AdamW([{"params": up, "lr": 0.1}, {"params": down, "weight_decay": 0.5}])
        for seed in range(3):
            _step(model, optimizer, seed)
        assert [p for group in optimizer.param_groups for p in group["params"]] == [*up, *down]
        ends.append(_full(model))
    assert _equal(*ends)


def test_a_parameter_without_gradient_is_unchanged(mesh):
    model = _net(mesh)
    optimizer = optim.AdamW(model.parameters())
    before = _full(model)
    optimizer.step()
    assert _equal(before, _full(model))
    assert not optimizer.state


@pytest.mark.parametrize("then", ["step", "state_dict", "forward", "zero_grad"])
def test_dtensors_are_restored_after_a_step_that_raises(mesh, then):
    model, other = _net(mesh), _net(mesh)
    optimizer, its = optim.AdamW(model.parameters()), optim.AdamW(other.parameters())
    for one, its_own in ((model, optimizer), (other, its)):
        _step(one, its_own, 0)
        torch.manual_seed(1)
        one(torch.randn(4, 4)).backward()
    optimizer.param_groups[0]["betas"] = None  # the step fails once it has begun
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    if then == "step":
        optimizer.step()
        its.step()
    elif then == "state_dict":
        assert isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)
    elif then == "forward":
        model(torch.randn(4, 4))
    else:
        optimizer.zero_grad()
        its.zero_grad()
        model(torch.randn(4, 4))
        assert all(param.grad is None for param in model.parameters())
    assert all(isinstance(param, DTensor) for param in optimizer.param_groups[0]["params"])
    assert all(isinstance(param, DTensor) for param in optimizer.state)
    for one, its_own in ((model, optimizer), (other, its)):
        torch.manual_seed(2)
        one(torch.randn(4, 4)).backward()
        its_own.step()
    assert _equal(_full(model), _full(other))


def test_optimizers_of_other_models_are_unchanged(mesh):
    _net(mesh)
    plain = TwoLinears()
    optimizer = optim.AdamW(plain.parameters())
    _step(plain, optimizer, 0)
    assert set(optimizer.state) == set(plain.parameters())


@pytest.mark.parametrize(
    "replaced", ["state dict", "moment", "state", "dict", "groups", "parameters", "local tensor"]
)
def test_what_is_replaced_between_steps_is_used(mesh, replaced):
    ends = []
    for mode in ("eager", "static"):
        model = _net(mesh, mode)
        params = list(model.parameters())
        optimizer = optim.AdamW(params[:2], lr=0.1)
        for seed in range(3):
            _step(model, optimizer, seed)
        if replaced == "state dict":
            saved = copy.deepcopy(optimizer.state_dict())
            _step(model, optimizer, 3)
            optimizer.load_state_dict(saved)
        elif replaced == "moment":
            optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])
        elif replaced == "state":
            optimizer.state.clear()
        elif replaced == "dict":
            optimizer.state = defaultdict(dict, optimizer.state)
        elif replaced == "groups":
            optimizer.add_param_group({"params": params[2:]})
        elif replaced == "parameters":
            optimizer.param_groups[0]["params"][1] = params[3]
        torch.manual_seed(4)
        model(torch.randn(4, 4)).backward()
        if replaced == "local tensor":
            params[0]._local_tensor = params[0]._local_tensor.clone()
        of_script = optimizer.state
        optimizer.step()
        assert optimizer.state is of_script
        state = [optimizer.state[one]["exp_avg"].full_tensor() for one in params[:1]]
        optimizer.zero_grad()
        _step(model, optimizer, 5)
        ends.append((_full(model), state))
    (eager, moments), (static, its_moments) = ends
    assert _equal(eager, static)
    assert all(map(torch.equal, moments, its_moments))


def test_state_is_released_before_another_is_loaded(mesh):
    model = _net(mesh)
    optimizer = optim.AdamW(model.parameters())
    for seed in range(2):
        _step(model, optimizer, seed)
    saved = copy.deepcopy(optimizer.state_dict())
    exp_avg = optimizer.state[next(model.parameters())]["exp_avg"]
    released = [weakref.ref(exp_avg), weakref.ref(exp_avg.to_local())]
    del exp_avg
    optimizer.load_state_dict(saved)
    gc.collect()
    assert [reference() for reference in released] == [None, None]
