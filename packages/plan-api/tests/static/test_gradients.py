"""Gradients of local parameters become DTensor gradients of their parameters."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, installed, parallelize
from testkit import fake_mesh


def steps(mesh):
    model = nn.Linear(4, 8, bias=False)
    plan = Plan(mesh).shard("weight", Shard(0), "tp").redistribute("<in>", Replicate(), Replicate())
    plan = plan.annotate("<out>", Shard(1))
    model = parallelize(model, plan, mode="static")
    (weight,) = model.parameters()  # model.weight is the local parameter
    return model, weight, torch.randn(3, 4)


def test_a_gradient_that_the_script_holds_is_not_overwritten():
    with fake_mesh((2,), ("tp",)) as mesh:
        model, weight, x = steps(mesh)
        model(x).sum().backward()
        saved = weight.grad
        before = saved.to_local().clone()
        model.zero_grad()
        model(2 * x).sum().backward()
        assert isinstance(saved, DTensor)
        assert weight.grad is not saved
        assert torch.equal(saved.to_local(), before)
        assert torch.equal(weight.grad.to_local(), 2 * before)


def test_gradients_accumulate_and_are_freed():
    with fake_mesh((2,), ("tp",)) as mesh:
        model, weight, x = steps(mesh)
        model(x).sum().backward()
        once = weight.grad.to_local().clone()
        model(x).sum().backward()
        assert torch.equal(weight.grad.to_local(), 2 * once)
        model.zero_grad()
        for _ in range(3):
            model(x).sum().backward()
            assert torch.equal(weight.grad.to_local(), once)
            model.zero_grad()
        with installed(model).gradients.no_sync():
            model(x).sum().backward()
        assert torch.equal(weight.grad.to_local(), once)
