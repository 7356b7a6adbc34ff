"""Muon resumes from checkpoints at other numbers of ranks, and trains a LLaMA as DDP does."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import Muon
from testkit import models, run_ranks
from testkit.checkpoints import load_checkpoint, save_checkpoint
from testkit.models.matrix_net import (
    TorchMuon,
    optimizer_of,
    sharded,
    train,
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "saved_as", "loaded", "loaded_as", "flat"),
    [
        pytest.param(2, Block(1), 4, Whole(), True, marks=pytest.mark.slow),
        (2, Rows(3), 1, Block(1), False),
        pytest.param(4, Rows(3), 1, Block(1), False, marks=pytest.mark.slow),
    ],
)
def test_training_resumes_at_another_number_of_ranks(
    tmp_path, saved, saved_as, loaded, loaded_as, flat
):
    def save():
        model = sharded(fully_shard, saved_as)
        optimizer = optimizer_of(Muon, model)
        train(model, optimizer, 3)
        save_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 5, 3)

    def load():
        model = sharded(fully_shard, loaded_as)
        optimizer = optimizer_of(Muon, model)
        train(model, optimizer, 1)  # state that loading overwrites
        load_checkpoint(tmp_path, model, optimizer, flat=flat)
        return train(model, optimizer, 5, 3)

    expected = run_ranks(save, saved)[0]
    for losses in run_ranks(load, loaded):
        assert losses == expected


@pytest.mark.ranks
def test_losses_of_a_llama_have_the_bits_of_ddp_with_torchs_muon():
    def check():
        curves = []
        for kind in ("ddp", "fsdp"):
            model = models.llama()
            if kind == "fsdp":
                for layer in model.model.layers:
                    fully_shard(layer)
                fully_shard(model)
                optimizer, called = optimizer_of(Muon, model), model
            else:
                called = DistributedDataParallel(model)
                optimizer = TorchMuon(model)
            losses = []
            for step in range(20):
                torch.manual_seed(10 * (step % 3) + dist.get_rank())
                ids = torch.randint(0, models.VOCABULARY, (2, 8))
                loss = called(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            curves.append(losses)
        return curves

    for ddp_losses, losses in run_ranks(check, 2):
        assert losses == ddp_losses
        assert losses[-1] < losses[0]
