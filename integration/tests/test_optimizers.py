"""Which optimizer a name stands for, and what of a model each of its groups has."""

import pytest
import torch

from fsdp.optim import SOAP, Adam8bit, Muon
from integration.models import build_model, model_shape
from integration.train.optimizers import build_optimizer


@pytest.mark.parametrize(
    ("name", "kind"),
    [("adamw", torch.optim.AdamW), ("adam8bit", Adam8bit), ("muon", Muon), ("soap", SOAP)],
)
def test_every_optimizer_has_all_parameters_and_the_same_options(name, kind):
    model = build_model(model_shape("llama-tiny"), seed=0)
    optimizer = build_optimizer(
        name, model, layers="model.layers", learning_rate=3e-4, weight_decay=0.2
    )
    assert type(optimizer) is kind
    state_bytes = [param for group in optimizer.param_groups for param in group["params"]]
    assert {id(param) for param in state_bytes} == {id(param) for param in model.parameters()}
    assert len(state_bytes) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"]) == (3e-4, 0.2)
        betas = (0.95, 0.95) if group.get("use_soap", name == "soap") else (0.9, 0.95)
        assert group.get("betas", betas) == betas


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_the_matrices_of_the_layers_have_another_optimizer_than_the_other_parameters(name):
    model = build_model(model_shape("llama-tiny"), seed=0)
    optimizer = build_optimizer(
        name, model, layers="model.layers", learning_rate=3e-4, weight_decay=0.2
    )
    names = {param: name for name, param in model.named_parameters()}
    hidden, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert [group.get(f"use_{name}", True) for group in optimizer.param_groups] == [True, False]
    assert len(hidden) == 2 * 7
    assert all(name.startswith("model.layers.") and "proj" in name for name in hidden)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= set(others)
    if name == "muon":
        assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_muon_has_the_matrices_of_a_dits_blocks_too():
    model = build_model(model_shape("dit-tiny"), seed=0)
    optimizer = build_optimizer(
        "muon", model, layers="model.blocks", learning_rate=3e-4, weight_decay=0.2
    )
    names = {param: name for name, param in model.named_parameters()}
    hidden, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert len(hidden) == 2 * 5
    assert all(name.startswith("model.blocks.") and name.endswith("weight") for name in hidden)
    assert "model.x_embedder.proj.weight" in others
