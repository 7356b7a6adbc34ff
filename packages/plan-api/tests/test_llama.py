"""An unmodified LLaMA of transformers', and a script for one device, on a mesh."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from plan_api import gradients, installed, parallelize, zoo
from testkit import run_ranks

pytestmark = pytest.mark.ranks


def _llama(attention="eager"):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, use_cache=False, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _loss(model, number):
    torch.manual_seed(100 + number)
    ids = torch.randint(0, 64, (4, 8))
    return model(input_ids=ids, labels=ids).loss


def _train(model):
    """A script for one device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        loss = _loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp and sp"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
def test_it_trains_as_on_one_device(shape, sp, attention):
    def check():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = _llama(attention)
        parallelize(model, zoo.llama(mesh, dp="dp", sp=sp))
        return _train(model), installed(model).extras, installed(model).fired.never

    losses = _train(_llama(attention))
    for ours, extras, never in run_ranks(check, shape[0] * shape[1], timeout=180):
        assert ours == pytest.approx(losses, abs=1e-5)
        assert extras == ("dist-rng", "dtensor-rules", "fused-comm")
        assert never == []


@pytest.mark.parametrize("alone", [False, True], ids=["fused-comm", "one by one"])
def test_a_microbatch_that_is_not_synchronised_counts(alone):
    """With fused-comm, and without it, which is said once."""

    def check():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = _llama()
        before, gradients.find_spec = gradients.find_spec, lambda name: not alone
        try:
            parallelize(model, zoo.llama(mesh, dp="dp", sp=True))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with installed(model).gradients.no_sync():
                    _loss(model, 0).backward()
                waits = model.lm_head.weight.grad.placements[0].is_partial()
                _loss(model, 1).backward()
                _loss(model, 2).backward()
        finally:
            gradients.find_spec = before
        said = [str(one.message) for one in caught if "plan-api[comm]" in str(one.message)]
        return [param.grad.full_tensor() for param in model.parameters()], len(said), waits

    model = _llama()
    for micro in range(3):
        _loss(model, micro).backward()
    for grads, said, waits in run_ranks(check, 2):
        assert said == alone
        assert waits
        for param, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-5, atol=1e-6)
