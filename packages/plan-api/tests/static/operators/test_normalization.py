"""Batch and group norm over a sharded batch in static mode: Eager's bits and collectives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from plan_api import Plan, generate_static, installed, parallelize
from testkit import CommLog, fake_mesh, run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class ConvNet(nn.Module):
    """Convolutions with a batch and a group norm, and a head."""

    def __init__(self):
        super().__init__()
        # No bias, whose gradient would be rounding errors, as batch norm subtracts the mean.
        # Strides are the kernels' sizes: torch 2.11's DTensor convolves in no other way.
        self.first, self.batch_norm = nn.Conv2d(3, 8, 2, 2, bias=False), nn.BatchNorm2d(8)
        self.second, self.group_norm = nn.Conv2d(8, 8, 3, 3), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x, labels):
        x = torch.relu(self.batch_norm(self.first(x)))
        x = torch.relu(self.group_norm(self.second(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels, label_smoothing=0.1)


def _net():
    torch.manual_seed(0)
    return ConvNet()


def _batch():
    return 1 + torch.randn(4, 3, 6, 6), torch.randint(0, 5, (4,))


def _train(model):
    """Returns the losses of 4 steps, parameters and buffers, and the number of collectives."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    torch.manual_seed(1)
    with CommLog() as log:
        for _ in range(4):
            loss = model(*_batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    state = {name: getattr(one, "_local_tensor", one) for name, one in model.state_dict().items()}
    return losses, state, log.counts()


def _plan(mesh):
    plan = Plan(mesh).shard("<in:x>", S0, "dp").shard("<in:labels>", S0, "dp")
    return plan.shard("<out>", R, "dp")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_norms_over_a_sharded_batch_train_as_in_eager_and_as_one_device(ranks):
    """A generated plan, which has no eager fallback; running statistics included."""

    def check():
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        plan = generate_static(_plan(mesh), _net(), _batch())
        static = parallelize(_net(), plan, mode="static", guard_steps=0)
        eager = parallelize(_net(), plan)
        runs = [_train(model) for model in (eager, static, _net())]
        return installed(static).lowered.eager, *runs

    for fallbacks, eager, static, single in run_ranks(check, ranks, timeout=300):
        assert fallbacks == ()
        assert static[0] == eager[0]
        assert eager[1].keys() == static[1].keys()
        for name, one in eager[1].items():
            assert torch.equal(one, static[1][name]), name
        assert static[2] == eager[2]
        assert static[0] == pytest.approx(single[0], rel=1e-4)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            name = f"batch_norm.{name}"
            assert torch.allclose(static[1][name], single[1][name], rtol=1e-4, atol=1e-5), name


def test_groups_on_several_ranks_are_refused():
    with fake_mesh((2,), ("tp",)) as mesh:
        for groups, placement in ((3, S1), (2, Shard(2))):
            plan = Plan(mesh).annotate("<op:group_norm>", placement)
            model = parallelize(nn.GroupNorm(groups, 6), plan, mode="static", guard_steps=0)
            with pytest.raises(ValueError, match=rf"the batch sharded, or {groups} groups"):
                model(torch.ones(2, 3, 4))
