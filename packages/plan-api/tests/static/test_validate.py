"""Plans and inputs that static mode refuses, before anything is sent or changed."""

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
    "src": (
        lambda plan: plan.shard("down.<in>", S0),
        r"down.forward_pre:<in>:0: expected its current placement along 'tp'.*S\(0\); add "
        r"redistribute\(path, src, dst\)",
    ),
    "grad_src": (
        lambda plan: plan.redistribute("up.<out>", S0, R),
        r"up.forward:<out>:0, S\(0\) to R along 'tp': .*placement of its gradient.*grad_src=",
    ),
    "grad_src beside grad_dst": (
        lambda plan: plan.redistribute("up.<out>", R, R, grad_dst=R),
        "up.forward:<out>:0, R to R along 'tp': .*grad_src=",
    ),
    "a redistribution that does not exist": (
        lambda plan: plan.redistribute("up.<out>", S0, P, grad_src=R),
        r"cannot redistribute S\(0\) to P",
    ),
    "a factory": (
        lambda plan: plan.factory("up", P),
        r"up.forward_pre: expected Shard or Replicate for the tensors.*along 'tp'.*got P",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_plan_is_refused_before_anything_is_sent(mesh, name):
    change, message = REFUSED[name]
    model, plan = TwoLinears(), Plan(mesh)
    change(plan)
    with CommLog() as log, pytest.raises(ValueError, match=message) as error:
        parallelize(model, plan, mode="static")
    assert str(error.value).startswith("the plan does not fit static mode:\n")
    assert log.calls == ()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    assert not model._forward_pre_hooks
    parallelize(model, Plan(mesh), mode="static")  # the model is unchanged


def test_all_problems_are_listed_in_one_error(mesh):
    plan = Plan(mesh)
    for change, _ in REFUSED.values():
        change(plan)
    with pytest.raises(ValueError, match="static mode") as error:
        parallelize(TwoLinears(), plan, mode="static")
    assert len(str(error.value).splitlines()) == 1 + 3  # three of them are of up.<out>


def test_phases_of_a_fully_sharded_parameter_are_refused():
    """Along another axis; along its own, they are in Eager, too."""
    with fake_mesh((2, 2), ("dp", "tp")) as mesh:
        plan = Plan(mesh).shard("up.weight", S0, "tp").shard("up.weight", R, "tp", Phase.RUN)
        plan.fully_shard("", "dp")
        message = (
            r"test_validate.py:\d+: up.weight: expected the same placements in every phase.*"
            r"fully_shard\('', dp.*\) unshards it"
        )
        with CommLog() as log, pytest.raises(ValueError, match=message):
            parallelize(TwoLinears(), plan, mode="static")
        assert log.calls == ()


def test_generate_static_refuses_unsupported_options_before_it_runs(mesh):
    model, plan = TwoLinears(), Plan(mesh).sequence("up.<in>", "tp", order="contiguous")
    message = r"up.forward_pre:<in>:0: expected fake=False with context parallel.*leave fake out"
    with CommLog() as log, pytest.raises(ValueError, match=message):
        generate_static(plan, model, (torch.ones(2, 4),), fake=True)
    assert log.calls == ()


def test_a_function_that_torch_does_not_have_is_refused(mesh):
    plan = Plan(mesh).annotate("up.<op:dropuot>", S0)
    with (
        CommLog() as log,
        pytest.raises(ValueError, match=r"up.*<op:dropuot>: expected a function"),
    ):
        parallelize(TwoLinears(), plan, mode="static")
    assert log.calls == ()


def test_embeddings_with_sharded_rows_are_refused(mesh):
    """Unless the plan reduces their Partial output."""
    plan = zoo.llama(mesh).shard(r"model\.embed_tokens\.weight", S0)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight: .*use mode='eager'"):
        parallelize(models.llama(), plan, mode="static")
    plan.shard(r"model\.embed_tokens.<out>", Replicate())
    parallelize(models.llama(), plan, mode="static")


def test_an_unknown_mode_is_refused(mesh):
    with pytest.raises(ValueError, match="mode='statik' must be 'eager' or 'static'"):
        parallelize(TwoLinears(), Plan(mesh), mode="statik")


def test_a_dtensor_input_is_refused(mesh):
    model = parallelize(TwoLinears(), Plan(mesh), mode="static")
    with pytest.raises(ValueError, match=r"expected plain tensors.*got a DTensor"):
        model(DTensor.from_local(torch.ones(4, 4), mesh, [R]))
    with pytest.raises(ValueError, match="got a DTensor"):
        model(x=DTensor.from_local(torch.ones(4, 4), mesh, [S0]))


@pytest.mark.ranks
def test_ranks_with_different_modes_or_gradient_placements_raise():
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
