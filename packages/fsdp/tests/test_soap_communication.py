"""What a step of SOAP sends, and how the work is divided."""

import pytest
import torch

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import SOAP
from testkit import CommLog, run_ranks
from testkit.models.matrix_net import matrices_of, optimizer_of, sharded, train


def sent(granularity, **options):
    model = sharded(fully_shard, granularity)
    optimizer = optimizer_of(SOAP, model, block_size=8, **options)
    train(model, optimizer, 1)
    model(torch.arange(6)).backward()
    with CommLog() as log:
        optimizer.step()
    return log, sum(param.numel() for _, param in matrices_of(model)), optimizer


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("granularity", [Block(1), Rows(8)], ids=str)
def test_step_sends_an_nth_of_gathering_all_matrices_on_all_ranks(ranks, granularity):
    """Strips that are sharded cost up to two Nths, and strips on their owner nothing."""

    def check():
        log, elements, _ = sent(granularity)
        log.assert_counts({"all_reduce": 1, "all_to_all": 2})
        return log.wire_bytes("all_to_all"), elements

    found = run_ranks(check, ranks)
    total, naive = sum(own for own, _ in found), found[0][1] * 4 * (ranks - 1)
    assert 0 < total <= 1.1 * naive / ranks


@pytest.mark.ranks
def test_small_buckets_are_more_collectives_with_the_same_bits():
    def check():
        log, _, _ = sent(Block(1), bucket_mb=1e-4)
        model, other = sharded(fully_shard), sharded(fully_shard)
        small = optimizer_of(SOAP, model, block_size=8, bucket_mb=1e-4)
        assert train(model, small, 4) == train(other, optimizer_of(SOAP, other, block_size=8), 4)
        return log.wire_bytes("all_reduce") > 0, log.counts()["all_to_all"]

    for compared, exchanges in run_ranks(check, 2):
        assert compared
        assert exchanges > 2


@pytest.mark.ranks
def test_step_sends_nothing_if_matrices_are_whole():
    def check():
        log, _, optimizer = sent(Whole())
        log.assert_counts({})
        return set(optimizer.owners().values())

    assert run_ranks(check, 2)[0] == {0, 1}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_owners_have_equal_work(ranks):
    def check():
        _, _, optimizer = sent(Block(1))
        return [(task.owner, task.cost) for task in optimizer._owner_plan.tasks]

    for tasks in run_ranks(check, ranks):
        busy = [sum(work for owner, work in tasks if owner == rank) for rank in range(ranks)]
        most = max(work for _, work in tasks)
        assert max(busy) <= sum(busy) / ranks + most
        assert len(tasks) == 5 + 2 + 2
