"""Gradients of a static model's leaves, as its parameters have them."""

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
    (weight,) = model.parameters()  # the model's own attribute is the leaf
    return model, weight, torch.randn(3, 4)


def test_a_gradient_that_somebody_has_stays_as_it_is():
    with fake_mesh((2,), ("tp",)) as mesh:
        model, weight, x = steps(mesh)
        model(x).sum().backward()
        kept = weight.grad
        before = kept.to_local().clone()
        model.zero_grad()
        model(2 * x).sum().backward()
        assert isinstance(kept, DTensor)
        assert weight.grad is not kept
        assert torch.equal(kept.to_local(), before)
        assert torch.equal(weight.grad.to_local(), 2 * before)


def test_gradients_accumulate_and_are_let_go():
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
