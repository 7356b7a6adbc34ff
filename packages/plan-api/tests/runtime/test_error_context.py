"""What hooks raise names the site, the plan's entry and its line."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from plan_api import Phase, Plan, parallelize
from plan_api.lowering.ir import AxisMove, HookPoint, OpKind, Site, SiteStep
from plan_api.runtime.error_context import append_site
from testkit.models import TwoLinears

R, S0 = Replicate(), Shard(0)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_an_error_of_an_output_names_entry_line_and_shape(mesh, mode):
    plan = Plan(mesh).shard("<in>", S0, "dp").redistribute("0.<out:1>", S0, R, "dp", grad_src=R)
    plan.annotate("<out>", S0, "dp")
    model = parallelize(nn.Sequential(nn.Identity()), plan, mode=mode, guard_steps=0)
    with pytest.raises(ValueError, match="no part 1") as raised:
        model(torch.ones(4, 2))
    message = str(raised.value)
    assert "at 0.forward, for entry 1 of the plan (test_error_context.py:" in message
    assert "redist <out>:1 dp=R" in message
    assert "Tensor of (" in message
    assert type(raised.value) is ValueError
    assert message.count("\nat 0.forward") == 1


def test_an_error_of_torch_names_one_argument(mesh):
    class Two(nn.Module):
        def forward(self, x, y):
            return x

    plan = Plan(mesh).shard("<in>", S0, "dp").shard("<in:1>", Shard(3), "dp")
    model = parallelize(Two(), plan)
    with pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)) as raised:
        model(torch.ones(4, 2), torch.ones(6, 2))
    message = str(raised.value)
    assert "at forward_pre, for entry 1 of the plan" in message
    assert "dp=S(3)" in message
    assert "entry 0" not in message
    assert "(6, 2)" in message
    assert message.count("\nat ") == 1


def test_an_error_of_a_subclass_keeps_its_message():
    step = SiteStep("<in>", 0, OpKind.REDIST, {"dp": AxisMove(S0)}, (0,), ("train.py:3",))
    full = torch.OutOfMemoryError("full")
    for _ in range(2):  # it may pass several hooks
        append_site(full, Site("0", HookPoint.FORWARD_PRE, (step,)), (0, "x"), torch.ones(4, 2))
    assert str(full) == "full"
    (note,) = full.__notes__
    assert "0.forward_pre, for entry 0 of the plan (train.py:3)" in note
    assert "(4, 2)" in note


def test_an_error_in_backward_names_the_entry_and_the_gradient(mesh):
    plan = Plan(mesh).shard("<in>", S0, "dp").redistribute("0.<out>", R, R, "tp", grad_dst=Shard(7))
    loss = parallelize(nn.Sequential(nn.Linear(2, 2)), plan)(torch.ones(4, 2)).sum()
    with pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)) as raised:
        loss.backward()
    message = str(raised.value)
    assert (
        "at the backward of 0.forward, for entry 1 of the plan (test_error_context.py:" in message
    )
    assert "tp=R; got a DTensor of (4, 2), placed " in message


def test_an_error_in_backward_of_static_mode_names_the_entry_and_the_gradient(mesh):
    plan = Plan(mesh).redistribute("up.<out>", R, R, "tp", grad_src=R, grad_dst=Shard(7))
    model = parallelize(TwoLinears(), plan, mode="static", guard_steps=0)
    loss = model(torch.ones(3, 4)).sum()
    with pytest.raises(IndexError) as raised:
        loss.backward()
    message = str(raised.value)
    assert (
        "at the backward of up.forward, for entry 0 of the plan (test_error_context.py:" in message
    )
    assert "got a torch.Tensor of (3, " in message


def test_an_error_of_a_module_on_local_tensors_names_its_entry(mesh):
    plan = Plan(mesh).annotate("0.<in>", Partial(), "tp").local("0", R, "tp")
    model = parallelize(nn.Sequential(nn.Identity()), plan)
    with pytest.raises(ValueError, match="no Partial input") as raised:
        model(torch.ones(4, 2))
    message = str(raised.value)
    assert "at 0, for entry 1 of the plan (test_error_context.py:" in message
    assert "a DTensor of (4, 2), placed R, P" in message


def test_an_error_of_a_redistributed_parameter_in_static_mode_names_its_entry(mesh):
    plan = Plan(mesh).shard("0.bias", S0, "tp").redistribute("0.bias", S0, R, "tp", grad_src=R)
    model = parallelize(nn.Sequential(nn.Linear(2, 4)), plan, mode="static", guard_steps=0)
    dist.destroy_process_group(mesh.get_group("tp"))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(4, 2))
    message = str(raised.value)
    assert "for entry 1 of the plan (test_error_context.py:" in message
    assert "redist bias:0 tp=R; got a torch.Tensor of (2,)" in message
    assert message.count("for entry 1") == 1


def test_an_error_of_an_operator_of_static_mode_names_its_entry(mesh):
    class Takes(nn.Module):
        def forward(self, x):
            return x.view(4, 3)

    plan = Plan(mesh).annotate("0.<op:view>", Shard(1), "tp")
    model = parallelize(nn.Sequential(Takes()), plan, mode="static", guard_steps=0)
    with pytest.raises(RuntimeError, match="invalid for input of size 12") as raised:
        model(torch.ones(4, 3))
    assert "at 0.op, for entry 0 of the plan (test_error_context.py:" in str(raised.value)


def test_an_error_of_attention_over_sequences_names_its_entry(mesh):
    class Attends(nn.Module):
        def forward(self, x):
            mask = torch.ones(4, 4, dtype=torch.bool)
            return nn.functional.scaled_dot_product_attention(x, x, x, mask)

    plan = Plan(mesh).shard("<in>", Shard(2), "tp").context("0", "tp")
    model = parallelize(nn.Sequential(Attends()), plan)
    with pytest.raises(ValueError, match="a mask by its description") as raised:
        model(torch.ones(2, 2, 4, 4))
    message = str(raised.value)
    assert "at attention of 0, for entry 1 of the plan (test_error_context.py:" in message
    assert "a DTensor of (2, 2, 4, 4), placed R, S(2)" in message


def test_an_error_of_gathering_a_parameter_names_its_entry(mesh):
    plan = Plan(mesh).shard("0.weight", S0, "dp", phase=Phase.INIT)
    plan.shard("0.weight", R, "dp", phase=Phase.RUN)
    model = parallelize(nn.Sequential(nn.Linear(2, 4)), plan)
    dist.destroy_process_group(mesh.get_group("dp"))
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(4, 2))
    message = str(raised.value)
    assert "at the gather of parameter weight, for entry 0 and 1 of the plan" in message
    assert "(test_error_context.py:" in message
    assert "got a DTensor of (4, 2), placed S(0), R" in message


def test_an_error_of_reordered_gradients_names_the_entry(mesh):
    class Attends(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    plan = Plan(mesh).sequence("<in>", "tp", dim=2).context("0", "tp", method="all-gather")
    plan.sequence("<out>", "tp", dim=2)
    out = parallelize(nn.Sequential(Attends()), plan)(torch.ones(2, 2, 8, 4, requires_grad=True))
    loss = out.to_local().sum()
    dist.destroy_process_group(mesh.get_group("tp"))
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    message = str(raised.value)
    assert "at the backward of forward, for entry 2 of the plan (test_error_context.py:" in message
    assert "got a torch.Tensor of (2, 2, 4, 4)" in message
