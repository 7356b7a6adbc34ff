"""What hooks raise names the site, the plan's entry and its line."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, parallelize
from plan_api.errors import add_site
from plan_api.fuse import Move, Site, Step
from plan_api.ir import Act, Moment

R, S0 = Replicate(), Shard(0)


@pytest.mark.parametrize("mode", ["eager", "static"])
def test_an_error_of_a_result_names_entry_line_and_shape(mesh, mode):
    plan = Plan(mesh).shard("<in>", S0, "dp").redistribute("0.<out:1>", S0, R, "dp", grad_src=R)
    plan.annotate("<out>", S0, "dp")
    model = parallelize(nn.Sequential(nn.Identity()), plan, mode=mode, guard_steps=0)
    with pytest.raises(ValueError, match="no part 1") as raised:
        model(torch.ones(4, 2))
    told = str(raised.value)
    assert "at 0.forward, for entry 1 of the plan (test_hook_errors.py:" in told
    assert "redist <out>:1 dp=R" in told
    assert "Tensor of (" in told
    assert type(raised.value) is ValueError
    assert told.count("\nat 0.forward") == 1


def test_an_error_of_torch_s_names_the_argument_alone(mesh):
    class Two(nn.Module):
        def forward(self, x, y):
            return x

    plan = Plan(mesh).shard("<in>", S0, "dp").shard("<in:1>", Shard(3), "dp")
    model = parallelize(Two(), plan)
    with pytest.raises((RuntimeError, IndexError, ValueError, AssertionError)) as raised:
        model(torch.ones(4, 2), torch.ones(6, 2))
    told = str(raised.value)
    assert "at forward_pre, for entry 1 of the plan" in told
    assert "dp=S(3)" in told
    assert "entry 0" not in told
    assert "(6, 2)" in told
    assert told.count("\nat ") == 1


def test_an_error_that_is_caught_by_its_class_keeps_its_message():
    step = Step("<in>", 0, Act.REDIST, {"dp": Move(S0)}, (0,), ("train.py:3",))
    full = torch.OutOfMemoryError("full")
    for _ in range(2):  # it may pass several hooks
        add_site(full, Site("0", Moment.FORWARD_PRE, (step,)), (0, "x"), torch.ones(4, 2))
    assert str(full) == "full"
    (note,) = full.__notes__
    assert "0.forward_pre, for entry 0 of the plan (train.py:3)" in note
    assert "(4, 2)" in note
