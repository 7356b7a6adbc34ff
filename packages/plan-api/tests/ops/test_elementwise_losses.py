"""Losses of pairs of elements on shards: the one device's numbers and gradients."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from plan_api import Plan, parallelize
from plan_api.patches import install_patches
from testkit import TORCH_RELEASE, run_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda x, y, **options: F.huber_loss(x, y, delta=0.3, **options),
    "binary cross entropy": F.binary_cross_entropy,
    "soft margin": lambda x, y, **options: F.soft_margin_loss(x, 2 * y - 1, **options),
    # Those that torch makes of other operators.
    "l1": F.l1_loss,
}
if TORCH_RELEASE >= (2, 12):  # 2.11's DTensor has no strategy for it
    LOSSES["with logits"] = F.binary_cross_entropy_with_logits


PLACEMENTS = [[S0, S1], [S0, R], [S0, S0], [R, R]]


@pytest.mark.parametrize(
    ("rules", "all_placements"),
    [
        pytest.param(True, PLACEMENTS, id="dtensor-rules"),
        pytest.param(False, PLACEMENTS[:1], id="torch's dispatch", marks=pytest.mark.slow),
        pytest.param(False, PLACEMENTS[1:], id="torch's dispatch, more", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_match_one_device(rules, all_placements):
    def check():
        import dtensor_rules

        install_patches(())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dtensor_rules.disable()
        with dtensor_rules.enabled() if rules else contextlib.nullcontext():
            return [
                case
                for name in LOSSES
                for placements in all_placements
                for reduction in ("mean", "sum", "none")
                if not same(case := (name, placements, reduction), mesh, (8, 4))
            ]

    def same(case, mesh, shape):
        name, placements, reduction = case
        torch.manual_seed(0)
        inputs, targets = torch.rand(shape), torch.rand(shape)
        plain = inputs.clone().requires_grad_()
        expected = LOSSES[name](plain, targets, reduction=reduction)
        expected.square().sum().backward()
        actual = distribute_tensor(inputs, mesh, placements).requires_grad_()
        targets = distribute_tensor(targets, mesh, placements)
        loss = LOSSES[name](actual, targets, reduction=reduction)
        loss.redistribute(placements=[R, R]).square().sum().backward()
        close = torch.allclose(loss.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        return close and torch.allclose(actual.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)

    assert run_ranks(check, 4, timeout=120) == [[]] * 4


def test_uneven_and_empty_shards_weights_sums_and_half_precision():
    def check():
        install_patches(())
        mesh = init_device_mesh("cpu", (4,))
        torch.manual_seed(0)
        found = []
        for rows in (3, 5):  # of four ranks
            x, y, weight = torch.rand(rows, 4), torch.rand(rows, 4), torch.rand(rows, 4)
            for dtype in (torch.float32, torch.bfloat16):
                plain = x.to(dtype, copy=True).requires_grad_()
                expected = F.binary_cross_entropy(plain, y.to(dtype), weight.to(dtype))
                expected.backward()
                actual = distribute_tensor(x.to(dtype), mesh, [S0]).requires_grad_()
                others = [distribute_tensor(one.to(dtype), mesh, [R]) for one in (y, weight)]
                loss = F.binary_cross_entropy(actual, *others)
                loss.backward()
                tolerance = 1e-6 if dtype is torch.float32 else 1e-2
                for mine, native in ((loss, expected), (actual.grad, plain.grad)):
                    mine = mine.full_tensor()
                    found.append(torch.allclose(mine, native, rtol=tolerance, atol=tolerance))
            part = distribute_tensor(x / 4, mesh, [R]).to_local()
            summed = torch.distributed.tensor.DTensor.from_local(part, mesh, [Partial()])
            found.append(torch.allclose(F.mse_loss(summed, y).full_tensor(), F.mse_loss(x, y)))
        return found

    assert run_ranks(check, 4) == [[True] * 10] * 4


def test_the_gradients_of_a_planned_model_are_those_of_one_device():
    """Adam would hide a factor."""

    class Fit(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.criterion = torch.nn.Linear(4, 4), torch.nn.MSELoss()

        def forward(self, x, y):
            return self.criterion(self.linear(x), y)

    def check():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = Plan(mesh).shard("<in>", S0, "dp").shard("<in:y>", S0, "dp").shard("<out>", R, "dp")
        plan.shard("linear.(weight|bias)", R, "dp")
        model = parallelize(Fit(), plan)
        model(x, y).backward()
        return [param.grad.full_tensor() for param in model.parameters()]

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    alone = Fit()
    alone(x, y).backward()
    for grads in run_ranks(check, 2):
        for actual, param in zip(grads, alone.parameters(), strict=True):
            torch.testing.assert_close(actual, param.grad)
