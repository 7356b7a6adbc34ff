"""Initializers called after `parallelize` draw one device's numbers, as in Eager."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from plan_api import Plan, installed, parallelize, uninstall
from testkit import fake_mesh, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Net(nn.Module):
    """Linears, column- and row-parallel, attention, an embedding, and an initializer of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.attention = nn.MultiheadAttention(4, 2)

    def reset_parameters(self):
        bound = 1 / math.sqrt(self.down.weight.size(1))
        self.down.weight.data.uniform_(-bound, bound)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.table(x))))


def _net(mesh, mode):
    torch.manual_seed(0)
    plan = Plan(mesh).shard(r"up\.(weight|bias)", S0).shard(r"down\.weight", S1)
    plan.shard(r"table\.weight", S1).shard(r"attention\.in_proj_weight", S0)
    return parallelize(Net(), plan, mode=mode, guard_steps=0) if mode else Net()


def _linears_to_normal(module):
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        nn.init.kaiming_uniform_(module.weight, a=1.0)
        module.bias.data.zero_()


INITIALIZERS = {
    "reset_parameters of torch": lambda net: net.up.reset_parameters(),
    "of a row-parallel module": lambda net: net.down.reset_parameters(),
    "of an embedding": lambda net: net.table.reset_parameters(),
    "by a function imported by name": lambda net: net.attention._reset_parameters(),
    "of the model": lambda net: net.reset_parameters(),
    "apply": lambda net: net.apply(_linears_to_normal),
    "a method of init": lambda net: nn.init.trunc_normal_(net.down.weight, std=0.02),
    "by keyword": lambda net: nn.init.normal_(tensor=net.up.weight, std=0.5),
    "orthogonal": lambda net: nn.init.orthogonal_(net.up.weight),
    "a constant": lambda net: nn.init.constant_(net.up.bias, 0.25),
}


def _initialized(net, name):
    torch.manual_seed(3)
    with torch.no_grad():
        INITIALIZERS[name](net)
    named = [(name, param.detach()) for name, param in net.named_parameters()]
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}
    return full, torch.rand(2)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_they_draw_the_numbers_of_one_device(ranks):
    """And the next random numbers are one device's, too; afterwards modules compute with them."""

    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        single, eager, static = (_net(mesh, mode) for mode in (None, "eager", "static"))
        found = {}
        for name in INITIALIZERS:
            (one, next_one), (of_eager, _), (of_static, next_static) = (
                _initialized(net, name) for net in (single, eager, static)
            )
            found[name] = (
                [key for key, param in one.items() if not torch.equal(param, of_static[key])],
                [key for key, param in of_eager.items() if not torch.equal(param, of_static[key])],
                torch.equal(next_one, next_static),
            )
        local = dict(static.named_parameters())["up.weight"].to_local()
        assert type(static.up.weight) is torch.Tensor
        assert static.up.weight.data_ptr() == local.data_ptr()
        return found

    for found in run_ranks(check, ranks):
        assert found == dict.fromkeys(INITIALIZERS, ([], [], True))


def test_methods_and_functions_are_restored():
    with fake_mesh((1,), ("tp",)) as mesh:
        net, native = _net(mesh, "static"), nn.init.normal_.__wrapped__
        assert "reset_parameters" in net.up.__dict__
        installed(net).remove()
        assert "reset_parameters" not in net.up.__dict__
        net.apply(lambda module: None)
        assert isinstance(net.up.weight, DTensor)  # not shown again
        uninstall()
        assert nn.init.normal_ is native
