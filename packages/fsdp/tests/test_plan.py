"""The entry point that plan-api calls."""

import contextlib
from importlib.metadata import EntryPoint, distribution

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp import Block, FSDPModule, Rows, Whole
from fsdp.mesh.roles import STRATEGIES
from fsdp.plan import fully_shard
from fsdp.state import state_of
from testkit import CommLog, run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("granularity", "unit"), [(None, 1), (Rows(2), 10), (Block(4), 4), (Whole(), 15), (Rows(), 5)]
)
def test_granularity_of_a_function_applies(granularity, unit):
    def check():
        model, mesh = nn.Linear(5, 3, bias=False), init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: granularity)
        assert isinstance(model, FSDPModule)
        return model.weight.to_local().numel()

    first, second = run_ranks(check, 2)
    assert first + second == 15
    assert first % unit == 0


def test_ignored_params_are_not_sharded():
    def check():
        model = nn.Linear(5, 3)
        bias = model.bias
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=[bias])
        assert model.bias is bias
        assert model.weight is not bias
        assert model.weight.to_local().numel() < 15

    run_ranks(check, 2)


def test_a_model_is_unsharded_within_a_block_and_reduces_nothing():
    """Settings, accumulated gradients and the next steps are as without it, if it raises too."""

    class VisitError(Exception):
        pass

    def fail(x):
        raise VisitError

    def train(visits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        x, ends = torch.full((3, 4), mesh.get_rank() + 1.0), []
        for step in range(4):
            model.set_requires_gradient_sync(step > 0)
            if visits:
                visit = fully_shard.unsharded(model)
                with contextlib.suppress(VisitError), visit, CommLog() as log:
                    shapes = [tuple(param.shape) for param in model.parameters()]
                    assert shapes == [(8, 4), (8,), (4, 8), (4,), (2, 4), (2,)]
                    assert not any(isinstance(param, DTensor) for param in model.parameters())
                    loss = model(x).sum()
                    grads = torch.autograd.grad(loss, list(model.parameters()))
                    assert [tuple(grad.shape) for grad in grads] == shapes
                    if step == 2:
                        model[1].forward = fail
                        model(x)
                model[1].__dict__.pop("forward", None)
                assert log.calls == ()
                assert all(isinstance(param, DTensor) for param in model.parameters())
            with CommLog() as log:
                model(x).square().sum().backward()
            ends.append(log.calls)
        return ends, [param.grad.to_local() for param in model.parameters()]

    def check():
        (calls, grads), (wanted_calls, wanted) = train(visits=True), train(visits=False)
        assert calls[1:] == wanted_calls[1:]
        return all(one.equal(other) for one, other in zip(grads, wanted, strict=True))

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.parametrize("raises_in", ["backward", "the block"])
def test_gradients_of_a_block_that_raises_are_dropped(raises_in):
    """They are not reduced in it, nor added to those of the next backward."""

    class FailingBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("as asked")

    def visit(model, x):
        with fully_shard.unsharded(model):
            hidden = model[0](x)
            if raises_in == "backward":
                hidden = FailingBackward.apply(hidden)
            model[1](hidden).sum().backward()
            raise ValueError("as asked")

    def grads(visits):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        x = torch.full((3, 4), mesh.get_rank() + 1.0)
        if visits:
            with pytest.raises(ValueError, match="as asked"):
                visit(model, x)
        model(x).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    def check():
        return all(map(torch.equal, grads(visits=True), grads(visits=False)))

    assert run_ranks(check, 2) == [True, True]


def test_entry_point_is_declared_and_loads():
    import tomllib
    from pathlib import Path

    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    value = declared["project"]["entry-points"]["plan_api.fully_shard"]["fsdp"]
    assert EntryPoint("fsdp", value, "plan_api.fully_shard").load() is fully_shard
    assert distribution("fsdp").name == "fsdp"


def test_placements_of_a_plan_are_those_of_the_groups():
    def check():
        torch.manual_seed(0)
        model = nn.Linear(4, 8)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), placements="zero2")
        model(torch.ones(3, 4)).sum().backward()
        (group,) = state_of(model).groups
        return group.options.roles == STRATEGIES["zero2"], group.all_gather._buffer.allocated

    for is_zero2, stays_gathered in run_ranks(check, 2):
        assert is_zero2
        assert stays_gathered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"placements": "zero4"},
            r"one of 'ddp', 'zero1', 'zero2', 'zero3' on 1 axes, got 'zero4'",
        ),
        ({"placements": "zero2", "ndim": 2}, r"one of 'hsdp', 'hfsdp' on 2 axes, got 'zero2'"),
        ({"placements": "zero1", "reshard_after_forward": True}, "keeps parameters unsharded"),
        ({"placements": "hfsdp", "ndim": 2, "other_axes": ("tp",)}, r"without other axes .*'tp'"),
    ],
)
def test_placements_that_do_not_exist_there_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fully_shard.check(**options)
