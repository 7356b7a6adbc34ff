"""On a GPU: the fast path has the bits of native dispatch, on whatever stream it runs."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dtensor_rules
from testkit import mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh
    dtensor_rules.disable()


def trained(mesh):
    """Losses, gradients and parameters of three steps of tensor parallelism."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)
    ).cuda()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizers = [torch.optim.AdamW([p], lr=1e-2, foreach=True) for p in model.parameters()]
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(32, 64, device="cuda")).square().sum()
        loss.backward()
        found += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(param.detach() for param in model.parameters())]


def moved(mesh):
    """Results of redistributions and of operators whose operands differ in placement."""
    whole, found = torch.arange(42.0, device="cuda").view(7, 6), []
    for source in (Replicate(), Shard(0), Shard(1)):
        placed = distribute_tensor(whole, mesh, [source])
        for target in (Replicate(), Shard(0), Shard(1)):
            found += [(placed * 2).redistribute(placements=[target]), placed + placed.sum(0)]
    assert (distribute_tensor(whole, mesh, [Shard(0)]).sum(0)).placements == (Partial(),)
    return found


@pytest.mark.parametrize("function", [trained, moved])
@pytest.mark.parametrize("side_stream", [False, True], ids=["default stream", "side stream"])
def test_it_has_the_bits_of_native_dispatch(mesh, function, side_stream):
    native = function(mesh)
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with dtensor_rules.enabled(), torch.cuda.stream(stream):
        dtensor_rules.stats_clear()
        actual = function(mesh)
        assert sum(one.rule + one.cache for one in dtensor_rules.stats().values()) > 0
    torch.cuda.synchronize()
    for one, other in zip(actual, native, strict=True):
        assert type(one) is type(other)
        assert torch.equal(
            getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
        )
