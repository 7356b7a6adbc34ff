"""What static mode refuses, before anything is sent or changed; by its name in the plan."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from plan_api import Phase, Plan, generate_static, parallelize, zoo
from testkit import CommLog, RankError, fake_mesh, models, run_ranks
from testkit.models import TwoLinears

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


REFUSED = {
    "fully_shard": (
        lambda plan: plan.fully_shard("up", "tp").fully_shard("", "tp"),
        r"test_static_errors.py:\d+: fully_shard\('up', tp.*: expected mode='eager' for "
        r"fully_shard, got mode='static'.*use mode='eager', or leave fully_shard out",
    ),
    "src": (
        lambda plan: plan.shard("down.<in>", S0),
        r"down.forward_pre:<in>:0, to be S\(0\) along 'tp': static mode has to know what it is "
        r"before: say redistribute\(path, src, dst\)",
    ),
    "grad_src": (
        lambda plan: plan.redistribute("up.<out>", S0, R),
        r"up.forward:<out>:0, S\(0\) to R along 'tp': .*what its gradient is before.*say grad_src=",
    ),
    "grad_src beside grad_dst": (
        lambda plan: plan.redistribute("up.<out>", R, R, grad_dst=R),
        "up.forward:<out>:0, R to R along 'tp': .*say grad_src=",
    ),
    "a move that there is not": (
        lambda plan: plan.redistribute("up.<out>", S0, P, grad_src=R),
        r"cannot move S\(0\) to P",
    ),
    "phases": (
        lambda plan: plan.shard("up.weight", S0).shard("up.weight", R, None, Phase.RUN),
        r"test_static_errors.py:\d+: up.weight rests otherwise than it runs: static mode has no "
        "phases",
    ),
    "a factory": (
        lambda plan: plan.factory("up", S0),
        r"up.forward_pre: what it makes is to be .*Shard\(dim=0\).*use mode='eager'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_static_mode_cannot_follow_is_refused_before_anything_is_sent(mesh, name):
    change, said = REFUSED[name]
    model, plan = TwoLinears(), Plan(mesh)
    change(plan)
    with CommLog() as log, pytest.raises(ValueError, match=said) as error:
        parallelize(model, plan, mode="static")
    assert str(error.value).startswith("the plan does not fit static mode:\n")
    assert log.calls == ()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    assert not model._forward_pre_hooks
    parallelize(model, Plan(mesh), mode="static")  # it is as good as before


def test_all_that_does_not_fit_is_named_at_once(mesh):
    plan = Plan(mesh)
    for name, (change, _) in REFUSED.items():
        if name != "fully_shard":  # beside phases it is refused in any mode
            change(plan)
    with pytest.raises(ValueError, match="static mode") as error:
        parallelize(TwoLinears(), plan, mode="static")
    assert len(str(error.value).splitlines()) == 1 + 4  # three of them are of up.<out>


@pytest.mark.parametrize("name", ["fully_shard", "phases", "a factory"])
def test_generate_static_refuses_what_static_mode_does_not_support_before_it_runs(mesh, name):
    change, said = REFUSED[name]
    model, plan = TwoLinears(), Plan(mesh)
    change(plan)
    with CommLog() as log, pytest.raises(ValueError, match=said):
        generate_static(plan, model, (torch.ones(2, 4),))
    assert log.calls == ()


def test_a_function_that_torch_has_not_is_refused(mesh):
    plan = Plan(mesh).annotate("up.<op:dropuot>", S0)
    with CommLog() as log, pytest.raises(ValueError, match=r"up.*<op:dropuot>: there is no"):
        parallelize(TwoLinears(), plan, mode="static")
    assert log.calls == ()


def test_embeddings_whose_rows_are_cut_are_refused(mesh):
    """Unless the plan says what becomes of the sum."""
    plan = zoo.llama(mesh).shard(r"model\.embed_tokens\.weight", S0)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: .*use mode='eager'"):
        parallelize(models.llama(), plan, mode="static")
    plan.shard(r"model\.embed_tokens.<out>", Replicate())
    parallelize(models.llama(), plan, mode="static")


def test_an_unknown_mode_is_refused(mesh):
    with pytest.raises(ValueError, match="mode='statik' must be 'eager' or 'static'"):
        parallelize(TwoLinears(), Plan(mesh), mode="statik")


def test_a_dtensor_given_to_the_model_is_refused(mesh):
    model = parallelize(TwoLinears(), Plan(mesh), mode="static")
    with pytest.raises(ValueError, match=r"the model is given a DTensor.*what one device would be"):
        model(DTensor.from_local(torch.ones(4, 4), mesh, [R]))
    with pytest.raises(ValueError, match="the model is given a DTensor"):
        model(x=DTensor.from_local(torch.ones(4, 4), mesh, [S0]))


def test_a_batch_that_cannot_be_cut_evenly_is_refused_by_site_and_shape(mesh):
    plan = Plan(mesh).redistribute("<in>", R, S0)
    model = parallelize(TwoLinears(), plan, mode="static")
    said = r"forward_pre:<in>:0 has shape \(3, 4\), and its dim 0 is to be cut into 2.*pad it"
    with CommLog() as log, pytest.raises(ValueError, match=said):
        model(torch.ones(3, 4))
    assert log.calls == ()
    model(torch.ones(4, 4))


@pytest.mark.ranks
def test_ranks_that_disagree_on_the_mode_or_on_gradients_are_told_so():
    def by_mode():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mode = "static" if mesh.get_rank() else "eager"
        parallelize(TwoLinears(), Plan(mesh).redistribute("<in>", R, R), mode=mode)

    def by_gradient():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        grad = P if mesh.get_rank() else R
        plan = Plan(mesh).redistribute("up.<out>", S0, R, grad_src=grad)
        parallelize(TwoLinears(), plan, mode="static")

    def by_operator():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = Plan(mesh).annotate("up.<op:dropout>", S0 if mesh.get_rank() else S1)
        parallelize(TwoLinears(), plan, mode="static")

    for call in (by_mode, by_gradient, by_operator):
        with pytest.raises(RankError) as error:
            run_ranks(call, 2)
        assert [report.state for report in error.value.reports] == ["raised", "raised"]
        assert "ValueError" in str(error.value)
        assert "differ" in str(error.value)
