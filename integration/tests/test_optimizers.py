"""Which optimizer a name stands for, and what of a model each of its groups has."""

import itertools
from pathlib import Path

import pytest
import torch

from fsdp.optim import SOAP, Adam8bit, AdamW, Muon
from integration.models import build_model, model_shape
from integration.train.config import TrainConfig
from integration.train.launch.world import World
from integration.train.loop import Trainer
from integration.train.optimizers import build_optimizer
from integration.train.setup import prepare
from testkit import run_ranks


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


def test_adamw_of_buffers_is_fsdps():
    model = build_model(model_shape("llama-tiny"), seed=0)
    made = [
        build_optimizer(
            "adamw",
            model,
            layers="model.layers",
            learning_rate=3e-4,
            weight_decay=0.2,
            on_buffers=on_buffers,
        )
        for on_buffers in (False, True)
    ]
    assert [type(one) for one in made] == [torch.optim.AdamW, AdamW]
    assert made[0].state_dict() == made[1].state_dict()


SYSTEMS = {
    "fsdp": {"system": "fsdp"},
    "plan": {"system": "plan", "dp_shard": 2},
    "plan, static": {"system": "plan", "dp_shard": 2, "static": True},
    "plan, tensor parallel, static": {"system": "plan", "tp": 2, "static": True},
}


def train(rank, out, choices, *, on_buffers, steps):
    """Trains to a step on one of 2 ranks, from the checkpoint if there is one, and saves."""
    config = TrainConfig(
        model="llama-tiny", out=out, micro_batch=2, steps=steps, resume="auto", **choices
    )
    setup = prepare(config, 2)
    assert setup.system.on_buffers
    setup.system.on_buffers = on_buffers
    trainer = Trainer(setup, World(rank, 2))
    assert type(trainer.optimizer) is (AdamW if on_buffers else torch.optim.AdamW)
    losses = []
    while trainer.step < steps:
        losses.append(trainer.train_step().item())
    trainer.save()
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    "system",
    [pytest.param(name, marks=() if name == "fsdp" else pytest.mark.slow) for name in SYSTEMS],
)
def test_adamw_of_buffers_trains_and_resumes_with_torchs_bits(system, tmp_path):
    def check(folder):
        rank, choices = torch.distributed.get_rank(), SYSTEMS[system]
        found = {}
        for first, then in itertools.product((False, True), repeat=2):
            out = Path(folder) / f"{first} {then}"
            found[first, then] = train(rank, out, choices, on_buffers=first, steps=2)
            found[first, then] += train(rank, out, choices, on_buffers=then, steps=4)
        return found

    for found in run_ranks(check, 2, str(tmp_path), timeout=180):
        expected = found.pop((False, False))
        assert len(set(expected)) == 4
        assert all(losses == expected for losses in found.values()), found


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
