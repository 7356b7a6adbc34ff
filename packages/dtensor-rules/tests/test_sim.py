"""On a simulated accelerator: the fast path has the bits of native dispatch, and does not race."""

import functools

import pytest

from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks


def both(function, device):
    """What a function gives with native torch and with the fast path, and how often it hit."""
    import dtensor_rules

    dtensor_rules.disable()  # a rank has on what the test before has left on
    native = function(device)
    with dtensor_rules.enabled():
        dtensor_rules.stats_clear()
        actual = function(device)
        hits = sum(op.rule + op.cache for op in dtensor_rules.stats().values())
    return native, actual, hits


def compared(function):
    """Whether native torch and the fast path agree on the device, and it with the CPU; the hits."""
    import torch

    native, actual, hits = both(function, "sim")
    _, expected, _ = both(function, "cpu")
    equal = [
        torch.equal(one, other) and torch.equal(one, host)
        for one, other, host in zip(actual, native, expected, strict=True)
    ]
    return equal, hits


def assert_same(function, world_size):
    for equal, hits in run_sim_ranks(compared, world_size, function, timeout=240):
        assert hits > 0, "nothing took the fast path"
        assert equal
        assert all(equal)


def on_host(tensors):
    from torch.distributed.tensor import DTensor

    local = (one.to_local() if isinstance(one, DTensor) else one for one in tensors)
    return [one.detach().to("cpu", copy=True) for one in local]


def trained(sharded, device):
    """Losses and gradients of three steps of tensor parallelism, with FSDP2 on its other axis."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6)).to(device)
    shape = (2, 2) if sharded else (1, 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if sharded:
        fully_shard(model, mesh=mesh["dp"])
    optimizers = [torch.optim.AdamW([p], lr=1e-2, foreach=True) for p in model.parameters()]
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 6).to(device)).square().sum()
        loss.backward()
        found += on_host([loss, *(param.grad for param in model.parameters())])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(False, id="tensor parallel"),
        pytest.param(True, id="with FSDP2", marks=pytest.mark.slow),
    ],
)
def test_training(sharded):
    assert_same(functools.partial(trained, sharded), 4 if sharded else 2)


def redistributed(device):
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    whole, found = torch.arange(42.0).view(7, 6).to(device), []
    for source in (Replicate(), Shard(0), Shard(1), Partial()):
        for target in (Replicate(), Shard(0), Shard(1)):
            start = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
            placed = start if source == Partial() else start.redistribute(placements=[source])
            # An operator between them, so that there is a plan to execute.
            moved = (placed * 2).redistribute(placements=[target])
            other = torch.ops.aten.add.Tensor(placed, moved)
            found += on_host([moved, other.full_tensor()])
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_redistribution_of_uneven_shards(world_size):
    assert_same(redistributed, world_size)
