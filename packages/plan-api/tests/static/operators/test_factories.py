"""Tensors that modules create in static mode: shards of one device's, as in Eager."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, parallelize
from testkit import fake_mesh, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Calls(nn.Module):
    """Its forward is a function of a test."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# By the size of dims that the code passes: a config's, or one of a sharded input.
CREATED = {
    "arange": lambda n: torch.arange(n),
    "arange with start and step": lambda n: torch.arange(2, 2 + 3 * n, 3),
    "arange by name": lambda n: torch.arange(start=1, end=1 + n, dtype=torch.float),
    "zeros": lambda n: torch.zeros(n, 3),
    "ones of a tuple": lambda n: torch.ones((n, 3), dtype=torch.int),
    "full": lambda n: torch.full((n, 2), 7.0),
    "rand": lambda n: torch.rand(n, 3),
    "randn by name": lambda n: torch.randn(size=(n, 20)),
    "randint": lambda n: torch.randint(0, 9, (n, 3)),
    "randint without a lower bound": lambda n: torch.randint(9, (n, 3)),
    "randperm": lambda n: torch.randperm(n),
    "normal": lambda n: torch.normal(0.0, 1.0, (n, 20)),
    "a scalar": lambda n: torch.tensor(2.5),
    "on another device": lambda n: torch.zeros(3, device="meta"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_creates_its_shard_of_what_one_device_creates(ranks):
    """Whether the code has global sizes or those of a sharded input; and as in Eager."""

    def outcome(function, *args):
        torch.manual_seed(1)
        created = function(*args)
        return created, torch.rand(2)  # the next random numbers, too

    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        found = {}
        for name, create in CREATED.items():
            single, after_single = outcome(create, 8)
            eager = parallelize(Calls(create), Plan(mesh).factory("", S0))
            from_config = parallelize(
                Calls(create), Plan(mesh).factory("", S0), mode="static", guard_steps=0
            )
            of_input = parallelize(
                Calls(lambda x, create=create: create(x.shape[0])),
                Plan(mesh).factory("", S0, sizes="local"), mode="static", guard_steps=0,
            )  # fmt: skip
            part = single.chunk(ranks)[mesh.get_rank()] if single.ndim and single.is_cpu else single
            of_eager, _ = outcome(eager, 8)
            local = of_eager.to_local() if isinstance(of_eager, DTensor) else of_eager
            for case, (created, after) in {
                "global": outcome(from_config, 8),
                "local": outcome(of_input, torch.zeros(8 // ranks)),
            }.items():
                if single.is_meta:
                    found[name, case] = created.is_meta
                    continue
                found[name, case] = (
                    torch.equal(created, part)
                    and torch.equal(created, local)
                    and created.dtype == single.dtype
                    and torch.equal(after, after_single)
                )
        return found

    for found in run_ranks(check, ranks):
        assert [case for case, same in found.items() if not same] == []


@pytest.fixture
def mesh():
    with fake_mesh((2,), ("tp",)) as mesh:
        yield mesh


def test_the_entry_of_the_innermost_module_applies(mesh):
    inner = Calls(lambda x: torch.zeros(4, 6))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x), torch.zeros(4, 6), torch.zeros_like(x)

    plan = Plan(mesh).factory("", S0).factory("inner", S1)
    outer = parallelize(Outer(), plan, mode="static", guard_steps=0)
    shapes = [one.shape for one in outer(torch.ones(5))]
    assert shapes == [(4, 3), (2, 6), (5,)]
    assert torch.zeros(4, 6).shape == (4, 6)  # nothing is placed afterwards


def test_a_function_without_sizes_is_refused_where_sizes_are_local(mesh):
    plan = Plan(mesh).factory("", S0, sizes="local")
    model = parallelize(Calls(lambda: torch.eye(4)), plan, mode="static", guard_steps=0)
    with pytest.raises(ValueError, match=r"torch.eye: expected a function that takes sizes"):
        model()


def test_this_rank_the_first_of_two_has_two_of_three_numbers(mesh):
    plan = Plan(mesh).factory("", S0)
    model = parallelize(Calls(lambda: torch.arange(3)), plan, mode="static", guard_steps=0)
    assert model().tolist() == [0, 1]


def test_sizes_are_global_or_local(mesh):
    with pytest.raises(ValueError, match=r"sizes='all' must be one of 'global', 'local'"):
        Plan(mesh).factory("", S0, sizes="all")
    plan = Plan(mesh).factory("", S0, sizes="local")
    assert Plan.from_json(plan.to_json(), mesh).entries == plan.entries
    assert "sizes='local'" in str(plan.entries[0])
