"""An unmodified LLaMA of transformers' on a mesh: fused attention, microbatches, no labels."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from plan_api import installed, options, parallelize, zoo
from testkit import FLATTENS_TWO_SHARDED_DIMS, NO_FLATTENING, models, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not FLATTENS_TWO_SHARDED_DIMS, reason=NO_FLATTENING),
]


def test_llama_with_fused_attention_trains_as_on_one_device():
    """Which cannot be with dropout: torch makes its mask of plain tensors (test_training.py)."""

    def loss(model):  # without padding: the CPU's attention of DTensors takes no mask
        ids = torch.randint(0, 64, (4, 8))
        return model(input_ids=ids, labels=ids).loss

    def check():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = models.llama(attn_implementation="sdpa")
        parallelize(model, zoo.llama(mesh, dp="dp", sp=True))
        return models.train(model, loss, steps=5), installed(model).coverage.unused_sites

    losses = models.train(models.llama(attn_implementation="sdpa"), loss, steps=5)
    for actual, never in run_ranks(check, 4, timeout=180):
        assert actual == pytest.approx(losses, abs=1e-5)
        assert never == []


def test_llama_without_labels_has_no_loss():
    def check():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = models.llama()
        parallelize(model, zoo.llama(mesh, dp="dp"))
        return model(input_ids=ids).logits.full_tensor().detach()

    ids = torch.randint(0, 64, (4, 8))
    expected = models.llama()(input_ids=ids).logits
    for logits in run_ranks(check, 2):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alone", [False, True], ids=["fused-comm", "one by one"])
def test_microbatches_under_no_sync_accumulate(alone):
    """With fused-comm, and without it, which is logged once."""

    def loss(model, number):
        torch.manual_seed(100 + number)
        return models.token_loss(model)

    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = models.llama()
        before = options.find_spec
        options.find_spec = lambda name: None if alone and name == "fused_comm" else before(name)
        try:
            parallelize(model, zoo.llama(mesh, dp="dp", sp=True))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with installed(model).gradients.no_sync():
                    loss(model, 0).backward()
                waits = model.lm_head.weight.grad.placements[0].is_partial()
                loss(model, 1).backward()
                loss(model, 2).backward()
        finally:
            options.find_spec = before
        pattern = [str(one.message) for one in caught if "plan-api[comm]" in str(one.message)]
        return [param.grad.full_tensor() for param in model.parameters()], len(pattern), waits

    model = models.llama()
    for micro in range(3):
        loss(model, micro).backward()
    for grads, pattern, waits in run_ranks(check, 2):
        assert pattern == alone
        assert waits
        for param, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-6)
