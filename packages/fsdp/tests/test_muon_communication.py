"""What a step of Muon sends."""

import pytest
import torch

from fsdp import Block, Whole, fully_shard
from fsdp.optim import Muon
from testkit import CommLog, run_ranks
from testkit.models.matrix_net import matrices_of, optimizer_of, sharded, train


def sent(granularity, **options):
    model = sharded(fully_shard, granularity)
    optimizer = optimizer_of(Muon, model, **options)
    train(model, optimizer, 1)
    model(torch.arange(6)).backward()
    with CommLog() as log:
        optimizer.step()
    return log, sum(param.numel() for _, param in matrices_of(model))


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_step_sends_an_nth_of_gathering_all_matrices_on_all_ranks(ranks):
    def check():
        log, elements = sent(Block(1))
        log.assert_counts({"all_reduce": 1, "all_to_all": 2})
        return log.wire_bytes("all_to_all"), elements

    found = run_ranks(check, ranks)
    total, naive = sum(own for own, _ in found), found[0][1] * 4 * (ranks - 1)
    assert 0 < total <= naive / ranks


@pytest.mark.ranks
def test_step_sends_nothing_if_matrices_are_whole():
    def check():
        log, _ = sent(Whole())
        log.assert_counts({})

    run_ranks(check, 2)
