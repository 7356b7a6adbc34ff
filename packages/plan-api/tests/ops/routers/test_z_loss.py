"""The z-loss of routers: one device's, however tokens are sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from plan_api import Plan, add_router_z_loss, installed, parallelize, zoo
from plan_api.ops.routers.tokens import routers_of
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, models, run_ranks

COEFFICIENT = 0.2  # large, so that a wrong loss is no rounding
needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)
FAMILIES = {
    "mixtral": (models.mixtral, zoo.mixtral, {}),
    "deepseek_v3": (models.deepseek_v3, zoo.deepseek_v3, {"dense": 1}),
}


def _batch():
    torch.manual_seed(3)
    ids = torch.randint(0, 64, (4, 8))
    return {"input_ids": ids, "labels": ids}


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _results(model, batch):
    """The loss, and the gradients."""
    loss = model(**batch).loss
    loss.backward()
    return _whole(loss).item(), [_whole(param.grad) for param in model.parameters()]


def _by_hand(make, batch):
    """The loss and the gradients of one device, from the routers' logits."""
    model, logits = make(), []
    for router in routers_of(model).values():
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    loss = model(**batch).loss
    own = loss.item()
    for of_layer in logits:
        loss = loss + COEFFICIENT * of_layer.logsumexp(-1).square().mean()
    loss.backward()
    assert loss.item() - own > 0.05
    return loss.item(), [param.grad for param in model.parameters()]


def _check(found, expected):
    loss, grads = expected
    for of_rank, of_params in found:
        assert of_rank == pytest.approx(loss, abs=2e-6, rel=0)
        for one, other in zip(of_params, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_one_device_has_the_loss_of_its_logits(family):
    make, _, _ = FAMILIES[family]
    model = make()
    loss = add_router_z_loss(model, COEFFICIENT)
    _check([_results(model, _batch())], _by_hand(make, _batch()))
    assert not loss.attached
    with torch.no_grad():
        assert model(**_batch()).loss == make()(**_batch()).loss
    assert model.eval()(**_batch()).loss == make().eval()(**_batch()).loss


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_device(mode, ranks, cases, family):
    make, plan_of, options = FAMILIES[family]

    def check(batch):
        found = []
        for shape, axes, product in cases:
            mesh, model = init_device_mesh("cpu", shape, mesh_dim_names=axes), make()
            add_router_z_loss(model, COEFFICIENT)
            plan = plan_of(mesh, **options, **product)
            plan.recompute(r"model\.layers\.\d+", "full")
            parallelize(model, plan, mode=mode)
            found.append(_results(model, batch))
        return found

    expected = _by_hand(make, _batch())
    for of_case in zip(*run_ranks(check, ranks, _batch(), timeout=240), strict=True):
        _check(of_case, expected)


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["eager", "static"])
def test_an_output_without_a_loss_gets_the_gradient(mode):
    """As stages of a pipeline and models whose loss the script computes do."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = models.mixtral()
        loss = add_router_z_loss(model, COEFFICIENT)
        plan = zoo.mixtral(mesh, tp=None, dp="dp")
        parallelize(model, plan, mode=mode)
        loss.scale = 0.5
        logits = model(input_ids=batch["input_ids"]).logits
        (logits.sum() * 0.0).backward()
        (value,) = loss.attached  # one, though the first call is validated
        return value.item(), [_whole(param.grad) for param in model.parameters()]

    reference, logits = models.mixtral(), []
    for router in routers_of(reference).values():
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    reference(input_ids=_batch()["input_ids"])
    expected = COEFFICIENT * sum(one.logsumexp(-1).square().mean() for one in logits)
    (0.5 * expected).backward()
    grads = [
        torch.zeros_like(param) if param.grad is None else param.grad
        for param in reference.parameters()
    ]
    _check(run_ranks(check, 2, _batch()), (expected.item(), grads))


@pytest.mark.ranks
def test_one_all_reduce_sums_the_tokens_of_all_ranks():
    """In static mode, of two numbers for each of two routers."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        found = []
        for requested in (True, False):
            model = models.mixtral()
            if requested:
                add_router_z_loss(model, COEFFICIENT)
            plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp")
            parallelize(model, plan, mode="static", guard_steps=0)
            with CommLog() as log:
                model(**batch)
            found.append([one.input_bytes for one in log.calls if one.op == "all_reduce"])
        return found

    for with_loss, without in run_ranks(check, 2, _batch()):
        for size in without:
            with_loss.remove(size)
        assert with_loss == [4 * 2 * 2]


def test_recomputed_routers_count_once():
    """By torch's checkpoint around the layer, also where backward calls the router again."""

    class TopKRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            logits = x @ self.weight
            return logits, logits.softmax(-1), logits.argmax(-1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = TopKRouter()

        def forward(self, x):
            return checkpoint(self.gate, x, use_reentrant=False)[1].square().mean()

    model, x = Model(), torch.arange(6.0).view(2, 3).requires_grad_()
    add_router_z_loss(model, 2.0)
    loss = model(x)
    own = x.softmax(-1).square().mean()
    assert loss.item() == pytest.approx((own + 2 * x.logsumexp(-1).square().mean()).item())
    loss.backward()
    assert model.gate.calls == 2
    weight = torch.eye(3).requires_grad_()
    logits = x.detach() @ weight
    (logits.softmax(-1).square().mean() + 2 * logits.logsumexp(-1).square().mean()).backward()
    torch.testing.assert_close(model.gate.weight.grad, weight.grad)


def test_what_has_no_effect_or_comes_too_late_is_refused(mesh):
    for coefficient in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a coefficient above 0"):
            add_router_z_loss(models.mixtral(), coefficient)
    with pytest.raises(ValueError, match=r"expected a model with routers .* got a Linear"):
        add_router_z_loss(nn.Linear(2, 2), 1.0)
    model = models.mixtral()
    add_router_z_loss(model, 1.0)
    with pytest.raises(ValueError, match="got one that has it already"):
        add_router_z_loss(model, 1.0)
    late = parallelize(models.mixtral(), Plan(mesh), src_data_rank=None)
    with pytest.raises(ValueError, match="before parallelize"):
        add_router_z_loss(late, 1.0)
    assert installed(late).mode == "eager"
