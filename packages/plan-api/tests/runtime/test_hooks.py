"""Arguments and results, however they are given."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, parallelize
from plan_api.runtime.hooks import register_always_called

R, S0 = Replicate(), Shard(0)


class Echo(nn.Module):
    """Returns what it is given."""

    def forward(self, x, mask=None, *, bias=None):
        return x, mask, bias


def placements(values):
    return [value.placements if isinstance(value, DTensor) else None for value in values]


@pytest.mark.parametrize("given", ["by place", "by name"])
def test_an_argument_is_found_by_position_and_by_name(mesh, given):
    model = parallelize(Echo(), Plan(mesh).shard("<in:1>", S0, "dp"))
    x, mask = torch.ones(4), torch.arange(4)
    found = model(x, mask) if given == "by place" else model(x, mask=mask)
    assert placements(found) == [None, (S0, R), None]
    assert torch.equal(found[1].to_local(), mask[:2])
    assert found[0] is x


def test_a_keyword_only_argument_is_found(mesh):
    model = parallelize(Echo(), Plan(mesh).shard("<in:bias>", S0, "dp"))
    assert placements(model(torch.ones(4), bias=torch.ones(4))) == [None, None, (S0, R)]


def test_a_missing_argument_is_skipped(mesh):
    plan = Plan(mesh).shard("<in:mask>", S0, "dp").shard("<in:bias>", S0, "dp")
    assert placements(parallelize(Echo(), plan)(torch.ones(4))) == [None] * 3


def test_several_arguments_are_redistributed_by_one_hook(mesh):
    plan = Plan(mesh).shard("<in>", S0, "dp").shard("<in:mask>", S0, "tp")
    found = parallelize(Echo(), plan)(torch.ones(4), mask=[torch.ones(4), {"a": torch.ones(4)}])
    assert found[0].placements == (S0, R)
    assert placements([found[1][0], found[1][1]["a"]]) == [(R, S0)] * 2


def test_a_result_is_chosen_by_its_number(mesh):
    model = parallelize(Echo(), Plan(mesh).shard("<out:1>", S0, "dp"))
    assert placements(model(torch.ones(4), torch.ones(4))) == [None, (S0, R), None]


def test_a_missing_part_of_a_result_is_named_at_each_call(mesh):
    class One(nn.Module):
        def forward(self, x):
            return x

    plan = Plan(mesh).shard("<out>", S0, "dp").shard("<out:1>", S0, "dp")
    model = parallelize(One(), plan)
    for _ in range(2):
        with pytest.raises(ValueError, match="forward: there is no part 1 in a DTensor"):
            model(torch.ones(4))


def test_hooks_that_are_always_called_have_the_same_ids_in_all_modules():
    called = []

    def register(module):
        module.register_forward_hook(lambda *_: called.append("other"))
        return [
            register_always_called(module, lambda *_: called.append("last")),
            register_always_called(module, lambda *_: called.append("first"), prepend=True),
        ]

    modules = nn.Linear(2, 2), nn.Linear(2, 2)
    handles = [register(module) for module in modules]
    assert [handle.id for handle in handles[0]] == [handle.id for handle in handles[1]] == [-1, -2]
    with pytest.raises(RuntimeError):
        modules[0](torch.ones(3))
    modules[0](torch.ones(2))
    assert called == ["first", "last", "first", "other", "last"]
    for handle in handles[0]:
        handle.remove()
    assert not modules[0]._forward_hooks_always_called
    modules[0](torch.ones(2))
    assert called[5:] == ["other"]
