"""On a simulated accelerator: every redistribution and operator has the bits of the CPU."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ragged_shard import InterleavedShard, RaggedShard, StridedRaggedShard
from testkit.sim.ranks import run_sim_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ONE_AXIS = [
    R,
    S0,
    S1,
    RaggedShard((0,), (5, 7)),
    RaggedShard((0, 1), (7, 89)),
    RaggedShard.owned_by(1, 2),
    InterleavedShard(0, 3),
    InterleavedShard(1, 2),
]
TWO_AXES = [
    (R, R),
    (S0, S1),
    (R, RaggedShard((0,), (5, 7))),
    (RaggedShard((0,), (1, 5)), R),
    (RaggedShard((0,), (1, 1)), InterleavedShard(1, 2)),
    (StridedRaggedShard((0,), (5, 1), split_factor=2), S0),
]


def whole(device):
    torch.manual_seed(0)
    return torch.randn(12, 8).to(device)


def locals_of(found):
    return [one.to_local().detach().to("cpu", copy=True) for one in found]


def redistributed(device, shape, placements):
    """Local tensors of every pair of placements, and of the gradient through it."""
    mesh = init_device_mesh(device, shape)
    found = []
    for source, target in itertools.product(placements, repeat=2):
        placed = distribute_tensor(whole(device), mesh, source).requires_grad_()
        moved = placed.redistribute(placements=target)
        moved.backward(distribute_tensor(whole(device) + 1, mesh, target))
        found += locals_of([moved, placed.grad])
    return found


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        pytest.param((2,), [(one,) for one in ONE_AXIS], id="one axis", marks=pytest.mark.slow),
        pytest.param((2, 2), TWO_AXES, id="two axes"),
    ],
)
def test_redistributions_have_the_bits_of_the_cpu(shape, placements):
    def check():
        pairs = [redistributed(device, shape, placements) for device in ("sim", "cpu")]
        return [torch.equal(found, expected) for found, expected in zip(*pairs, strict=True)]

    for same in run_sim_ranks(check, torch.Size(shape).numel(), timeout=120):
        assert len(same) == 2 * len(placements) ** 2
        assert all(same)


def computed(device):
    """Operators on ragged tensors: by element, in place, reductions, and of two placements."""
    mesh = init_device_mesh(device, (2,))
    found = []
    for placement in ONE_AXIS:
        x = distribute_tensor(whole(device), mesh, [placement])
        partial = DTensor.from_local(whole(device) * (1.1 + dist.get_rank()), mesh, [Partial()])
        found += [
            x.exp() + x,
            x.clone().mul_(3).sub_(x),
            x.sum(),
            x.amax(),
            torch.nn.functional.gelu(x),
            torch._foreach_mul([x, x], 2.0)[1],
            partial.redistribute(placements=[placement]),
        ]
    return locals_of(found)


def test_operators_have_the_bits_of_the_cpu():
    def check():
        pairs = zip(computed("sim"), computed("cpu"), strict=True)
        return [torch.equal(found, expected) for found, expected in pairs]

    for same in run_sim_ranks(check, 2, timeout=120):
        assert same
        assert all(same)
