"""Cross entropy of DTensors: the one device's, without gathering what is sharded."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from plan_api import installed, parallelize, zoo
from plan_api.patches import install_patches
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, models, run_ranks

pytestmark = pytest.mark.ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
CLASSES = 67  # 34 and 33 on two ranks


def batch(*rows):
    """Logits and targets, of which the first half of the batch ignores more than the second."""
    torch.manual_seed(0)
    logits, targets = torch.randn(rows[0], CLASSES, *rows[1:]), torch.randint(CLASSES, rows)
    targets[:3] = -100
    return logits, targets


SHAPES = [(8,), (8, 4)]  # of the targets


@pytest.mark.parametrize(
    ("rules", "shapes"),
    [
        pytest.param(True, SHAPES, id="dtensor-rules"),
        pytest.param(False, SHAPES[1:], id="torch's dispatch", marks=pytest.mark.slow),
        pytest.param(False, SHAPES[:1], id="torch's dispatch, one dim", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_match_one_device(rules, shapes):
    def check():
        import dtensor_rules

        install_patches(())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        weight = torch.rand(CLASSES)
        found = []
        dtensor_rules.disable()
        with dtensor_rules.enabled() if rules else contextlib.nullcontext():
            for placements in ([S0, S1], [R, S1], [S1, S0], [S0, R], [R, R], [S0, S0], [S1, S1]):
                for rows in shapes:
                    for reduction in ("mean", "sum", "none"):
                        for options in ({}, {"weight": weight}):
                            found.append(compare(mesh, placements, rows, reduction, options))
        return [one for one in found if one]

    def compare(mesh, placements, rows, reduction, options):
        logits, targets = batch(*rows)
        plain = logits.clone().requires_grad_()
        expected = F.cross_entropy(plain, targets, reduction=reduction, **options)
        expected.square().sum().backward()
        actual = distribute_tensor(logits, mesh, placements).requires_grad_()
        targets = distribute_tensor(targets, mesh, [R, R])
        options = {name: distribute_tensor(one, mesh, [R, R]) for name, one in options.items()}
        loss = F.cross_entropy(actual, targets, reduction=reduction, **options)
        loss.redistribute(placements=[R, R]).square().sum().backward()
        close = torch.allclose(loss.full_tensor(), expected, rtol=1e-5, atol=1e-6)
        same = torch.allclose(actual.grad.full_tensor(), plain.grad, rtol=1e-5, atol=1e-6)
        return None if close and same else (placements, rows, reduction, list(options), close, same)

    assert run_ranks(check, 4, timeout=180) == [[]] * 4


def test_more_ranks_than_classes_and_half_precision():
    def check():
        install_patches(())
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (4,))
        logits, targets = torch.randn(8, 3), torch.randint(3, (8,))
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            plain = logits.to(dtype, copy=True).requires_grad_()
            F.cross_entropy(plain, targets).backward()
            actual = distribute_tensor(logits.to(dtype), mesh, [S1]).requires_grad_()
            loss = F.cross_entropy(actual, distribute_tensor(targets, mesh, [R]))
            loss.backward()
            tolerance = 1e-6 if dtype is torch.float32 else 1e-2
            grad = actual.grad.full_tensor()
            results.append(torch.allclose(grad, plain.grad, rtol=tolerance, atol=tolerance))
        return results

    assert run_ranks(check, 4) == [[True, True]] * 4


def test_partial_logits_are_reduced_and_plain_targets_replicated():
    def check():
        install_patches(())
        mesh = init_device_mesh("cpu", (2,))
        logits, targets = batch(8)
        half = distribute_tensor(logits / 2, mesh, [R]).to_local()
        summed = torch.distributed.tensor.DTensor.from_local(half, mesh, [Partial()])
        loss = F.cross_entropy(summed, targets)
        return torch.allclose(loss.full_tensor(), F.cross_entropy(logits, targets))

    assert run_ranks(check, 2) == [True, True]


@pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_of_a_language_model_are_never_gathered(name):
    """What is sent before gradients are reduced is hidden states, and numbers of rows."""

    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = getattr(models, name)(vocab_size=512)
        parallelize(model, getattr(zoo, name)(mesh, dp="dp", loss_parallel=True))
        with CommLog() as log, installed(model).gradients.no_sync():
            models.token_loss(model).backward()
        logits = model(input_ids=torch.zeros(4, 8, dtype=torch.long)).logits
        with CommLog() as gathering:
            logits.full_tensor()
        largest = [max(one.output_bytes for one in found.calls) for found in (log, gathering)]
        return *largest, logits.placements

    for largest, gathered, placements in run_ranks(check, 2, timeout=180):
        assert gathered == 4 * 8 * 512 * 4
        assert largest <= gathered // 8
        assert placements == (S0, Shard(2))
