"""On a GPU: redistributions move the host's bits, and operators stay near its numbers."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard
from testkit import mesh_of_one

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PLACEMENTS = [
    Replicate(),
    Shard(0),
    Shard(1),
    RaggedShard((0,), (12,)),
    RaggedShard((0, 1), (96,)),
    InterleavedShard(0, 3),
    InterleavedShard(1, 2),
]


@pytest.fixture
def mesh():
    with mesh_of_one("cuda") as mesh:
        yield mesh


def whole():
    torch.manual_seed(0)
    return torch.randn(12, 8).cuda()


def test_tensors_and_gradients_are_redistributed(mesh):
    for source, target in itertools.product(PLACEMENTS, repeat=2):
        placed = distribute_tensor(whole(), mesh, [source]).requires_grad_()
        moved = placed.redistribute(placements=[target])
        moved.backward(distribute_tensor(whole() + 1, mesh, [target]))
        assert moved.placements == (target,)
        assert torch.equal(moved.full_tensor(), whole())
        assert torch.equal(placed.grad.full_tensor(), whole() + 1)


def test_sums_of_ranks_become_shards(mesh):
    partial = DTensor.from_local(whole(), mesh, [Partial()])
    for target in PLACEMENTS:
        assert torch.equal(partial.redistribute(placements=[target]).full_tensor(), whole())


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_operators_have_the_values_of_plain_tensors(mesh, placement):
    plain, x = whole(), distribute_tensor(whole(), mesh, [placement])
    pairs = [
        (x.exp() + x, plain.exp() + plain),
        (x.clone().mul_(3).sub_(x), plain.clone().mul_(3).sub_(plain)),
        (torch.nn.functional.gelu(x), torch.nn.functional.gelu(plain)),
        (torch._foreach_mul([x, x], 2.0)[1], plain * 2),
        (x.amax(), plain.amax()),
    ]
    for found, expected in pairs:
        assert found.device.type == "cuda"
        assert torch.equal(found.full_tensor(), expected)
    torch.testing.assert_close(x.sum().full_tensor(), plain.sum())  # in another order


@pytest.mark.parametrize("foreach", [True, False])
def test_an_optimizer_steps_as_on_plain_tensors(mesh, foreach):
    values = []
    for place in (lambda: whole(), lambda: distribute_tensor(whole(), mesh, [PLACEMENTS[4]])):
        param = torch.nn.Parameter(place())
        optimizer = torch.optim.AdamW([param], lr=1e-2, foreach=foreach)
        for _ in range(3):
            param.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        values.append(param.detach())
    assert torch.equal(values[1].full_tensor(), values[0])
