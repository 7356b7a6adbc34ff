"""Every elementwise optimizer of torch.optim on ragged parameters, against plain parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ragged_shard
from ragged_shard import RaggedShard, StridedRaggedShard
from testkit import CommLog, assert_bitwise, run_ranks

pytestmark = pytest.mark.ranks

R = Replicate()
SHAPES = [(12, 8), (6, 4), (12,)]
# torch's fused CPU kernels round their last elements, those that fill no vector of 16, otherwise
# than the rest: bits are compared where every shard fills its vectors.
FUSED_SHAPES = [(48, 16), (24, 16), (192,)]


def values(step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw single": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, foreach=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
}

MESHES = {
    "ragged": ((2,), [[RaggedShard((0,), (1, 2))] * 3, [RaggedShard((0,), (0, 3))] * 3]),
    "elements": ((2,), [[RaggedShard((0, 1), (5, 7)), RaggedShard((0, 1), (1, 0)),
                         RaggedShard.owned_by(1, 2)]]),
    "hsdp": ((2, 2), [[(R, RaggedShard((0,), (1, 2)))] * 3]),
    "strided": ((2, 2), [[(StridedRaggedShard((0,), (1, 2), 2), Shard(0))] * 3]),
}  # fmt: skip


def train(name, layout, steps):
    shape, layouts = MESHES[layout]
    shapes = FUSED_SHAPES if "fused" in name else SHAPES
    mesh = init_device_mesh("cpu", shape)
    for placements in layouts:
        placed = [p if isinstance(p, tuple) else (p,) for p in placements]
        plain = [nn.Parameter(value) for value in values(0, shapes)]
        sharded = [
            nn.Parameter(distribute_tensor(value, mesh, where))
            for value, where in zip(values(0, shapes), placed, strict=True)
        ]
        reference, optimizer = OPTIMIZERS[name](plain), OPTIMIZERS[name](sharded)
        for step in range(1, steps + 1):
            for p, q, grad, where in zip(plain, sharded, values(step, shapes), placed, strict=True):
                p.grad = grad.clone()
                q.grad = distribute_tensor(grad, mesh, where)
            reference.step()
            with ragged_shard.strict():
                if step == steps:
                    with CommLog() as log:
                        optimizer.step()
                    log.assert_counts({})
                else:
                    optimizer.step()
        for p, q, where in zip(plain, sharded, placed, strict=True):
            assert q.placements == tuple(where)
            assert_bitwise(q.full_tensor(), p.detach(), f"{name} {where}")
        for p, q in zip(plain, sharded, strict=True):
            for key, value in reference.state[p].items():
                mine = optimizer.state[q][key]
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                assert_bitwise(torch.as_tensor(mine), torch.as_tensor(value), f"{name} {key}")


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize(
    "name", ["adamw foreach", pytest.param("adamw fused", marks=pytest.mark.slow)]
)
def test_twenty_steps_of_adamw_equal_one_devices_bitwise(name, layout):
    run_ranks(train, 2 if len(MESHES[layout][0]) == 1 else 4, name, layout, 20)


NO_INDEX_PUT = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11's DTensor has no index_put_, which Rprop needs"
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=NO_INDEX_PUT if n == "rprop" else ()) for n in OPTIMIZERS]
)
def test_elementwise_optimizers_equal_one_devices_bitwise_and_send_nothing(name):
    run_ranks(train, 2, name, "ragged", 3)


def scaled():
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(values(0)[0], mesh, [RaggedShard((0,), (5, 7))]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter.grad = distribute_tensor(values(1)[0] * 4, mesh, [RaggedShard((0,), (5, 7))])
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    expected = torch.add(values(0)[0], values(1)[0], alpha=-0.1)
    assert_bitwise(parameter.full_tensor(), expected, "scaled step")
    before = parameter.full_tensor()
    parameter.grad = distribute_tensor(
        values(1)[0].index_fill(0, torch.tensor([0]), torch.inf), mesh, [RaggedShard((0,), (5, 7))]
    )
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)  # rank 0 alone sees the infinity; both skip
    assert_bitwise(parameter.full_tensor(), before, "skipped step")


def test_a_gradient_scaler_skips_on_every_rank_when_one_overflows():
    run_ranks(scaled, 2)
