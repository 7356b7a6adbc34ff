"""The auxiliary loss of transformers' routers: one device's, however tokens are sharded."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.models.mixtral import modeling_mixtral

from plan_api import Plan, installed, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, CommLog, RankError, models, run_ranks

R = [Replicate()] * 2
# Large, so that a wrong loss is no rounding.
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
NATIVE = modeling_mixtral.load_balancing_loss_func
needs_flattening = pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING)


def _batch(padded=False):
    torch.manual_seed(3)
    ids = torch.randint(0, 64, (4, 8))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[-1, 5:] = mask[1, 2:] = 0
    return {"input_ids": ids, "labels": ids.where(mask.bool(), -100), "attention_mask": mask}


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _results(model, batch):
    """The loss, the auxiliary loss, and the gradients."""
    out = model(**batch)
    out.loss.backward()
    losses = [_whole(out.loss).item(), _whole(out.aux_loss).item()]
    return losses, [_whole(param.grad) for param in model.parameters()]


def _check(found, batch):
    losses, grads = _results(models.mixtral(**LOSS), batch)
    without = models.mixtral()
    without(**batch).loss.backward()
    gates = [name.endswith("gate.weight") for name, _ in without.named_parameters()]
    changed = [
        (one - param.grad).abs().max()
        for one, param, is_gate in zip(grads, without.parameters(), gates, strict=True)
        if is_gate
    ]
    assert min(changed) > 1e-4  # 100 times what is allowed below
    for of_rank, of_params in found:
        assert of_rank == pytest.approx(losses, abs=2e-6, rel=0)
        for one, other in zip(of_params, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.ranks
@needs_flattening
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["eager", pytest.param("static", marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_device(mode, ranks, cases):

    def check(batch):
        found = []
        for shape, axes, options in cases:
            mesh, model = (
                init_device_mesh("cpu", shape, mesh_dim_names=axes),
                models.mixtral(**LOSS),
            )
            parallelize(model, zoo.mixtral(mesh, **options), mode=mode, strict=True)
            found.append(_results(model, batch))
            if mode == "static" and ranks == 2:
                installed(model).check(**batch)  # again, when transformers collects outputs
            assert modeling_mixtral.load_balancing_loss_func is NATIVE
        return found

    batch = _batch()
    for of_case in zip(*run_ranks(check, ranks, batch, timeout=240), strict=True):
        _check(of_case, batch)


@pytest.mark.ranks
def test_padding_is_no_token():
    """In static mode: in Eager transformers makes no mask of a sharded one."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp")
        plan.shard("<in:attention_mask>", Shard(0), "dp")
        model = parallelize(models.mixtral(**LOSS), plan, mode="static", guard_steps=0)
        return _results(model, batch)

    batch = _batch(padded=True)
    _check(run_ranks(check, 2, batch, timeout=120), batch)


@pytest.mark.ranks
def test_a_mask_of_other_tokens_is_refused():
    def check(batch):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = models.mixtral(**LOSS)
        plan = zoo.mixtral(mesh, dp="dp", sp=True, ep="tp")
        plan.shard("<in:attention_mask>", [Shard(0), Replicate()])
        parallelize(model, plan, mode="static", guard_steps=0)
        try:
            model(**batch)
        finally:
            assert modeling_mixtral.load_balancing_loss_func is NATIVE

    with pytest.raises(RankError, match=r"expected an attention_mask of this rank's 16 tokens.*32"):
        run_ranks(check, 2, _batch(padded=True))


@pytest.mark.ranks
def test_one_all_reduce_sums_the_tokens_of_all_ranks():
    """In static mode, of two numbers for each of four experts and the number of tokens."""

    def check(batch):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        found = []
        for requested in (True, False):
            model = models.mixtral(**LOSS)
            plan = zoo.mixtral(mesh, tp=None, dp="dp", ep="dp")
            parallelize(model, plan, mode="static", guard_steps=0)
            with CommLog() as log:
                model(**batch, output_router_logits=requested)
            found.append([one.input_bytes for one in log.calls if one.op == "all_reduce"])
        return found

    for with_loss, without in run_ranks(check, 2, _batch()):
        for size in without:
            with_loss.remove(size)
        assert with_loss == [4 * (2 * 4 + 1)]


class Other(nn.Module):
    """Computes a loss of its routers in a way of its own."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(output_router_logits=False)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, output_router_logits=None):
        return x * self.weight


@pytest.mark.parametrize("by", ["config", "argument"])
def test_a_loss_that_is_not_of_the_known_function_is_refused(mesh, by):
    plan = Plan(mesh).shard("weight", R).shard("<in:x>", R)
    model = parallelize(Other(), plan, src_data_rank=None)
    model(torch.ones(2))
    arguments = {"output_router_logits": True} if by == "argument" else {}
    model.config.output_router_logits = by == "config"
    with pytest.raises(ValueError, match=r"expected output_router_logits=False.*in the script"):
        model(torch.ones(2), **arguments)
