"""The loss scale of fp16 changes as torch's does, and gradients are unscaled on all ranks alike."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from integration.train.model.loss_scale import LossScale, unscale_gradients
from testkit import run_ranks


def test_it_changes_as_that_of_torch():
    """With its defaults, over one growth and steps that are not finite around it."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler, scale = torch.amp.GradScaler("cpu"), LossScale()
    scaler.scale(torch.ones(1))  # makes its scale
    overflows, values = {3, 4, 2500}, set()
    for step in range(4600):
        weight.grad = torch.full((1,), torch.inf if step in overflows else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scale = scale.after(finite=step not in overflows)
        values.add(scale.value)
        assert scale.value == scaler.get_scale(), step
    assert values == {2.0**16, 2.0**15, 2.0**14}


@pytest.mark.ranks
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_gradients_are_divided_and_one_that_is_not_finite_is_found_by_all(bad):
    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plain = nn.Parameter(torch.zeros(3))
        # Of one row: the second rank has none.
        sharded = nn.Parameter(distribute_tensor(torch.zeros(1, 4), mesh, [Shard(0)]))
        unused = nn.Parameter(torch.zeros(2))
        params = [plain, sharded, unused]

        def unscale(values):
            plain.grad = torch.tensor(values)
            sharded.grad = distribute_tensor(torch.full((1, 4), 8.0), mesh, [Shard(0)])
            return unscale_gradients(params, 4.0, torch.device("cpu"))

        assert unscale([4.0, 8.0, 0.0])
        assert plain.grad.tolist() == [1.0, 2.0, 0.0]
        assert sharded.grad.full_tensor().tolist() == [[2.0] * 4]
        assert unused.grad is None
        return unscale([1.0, 1.0, bad if dist.get_rank() == 0 else 1.0])

    assert run_ranks(check, 2) == [False, False]
