"""What SOAP sends and who does the work: strips of blocks to owners, nothing where whole."""

import pytest
import torch

from fsdp import Block, Rows, Whole, fully_shard
from fsdp.optim import SOAP
from fsdp.optim.matrix.matrices import matrices_of as matrices_in
from fsdp.optim.soap.blocks import block_ranges, soap_cost, split_into_strips
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
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("granularity", [Block(1), Rows(8)], ids=str)
def test_a_step_sends_an_nth_of_what_gathering_everything_would(ranks, granularity):
    """About: strips that are cut cost two Nths, and those that lie whole on their owner nothing."""

    def check():
        log, elements, _ = sent(granularity)
        log.assert_counts({"all_reduce": 1, "all_to_all": 2})
        return log.wire_bytes("all_to_all"), elements

    found = run_ranks(check, ranks)
    total, naive = sum(own for own, _ in found), found[0][1] * 4 * (ranks - 1)
    assert 0 < total <= 1.1 * naive / ranks


@pytest.mark.ranks
def test_small_buckets_are_as_many_collectives_and_the_same_bits():
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
def test_whole_matrices_are_computed_on_where_they_lie_and_nothing_is_sent():
    def check():
        log, _, optimizer = sent(Whole())
        log.assert_counts({})
        return set(optimizer.owners().values())

    assert run_ranks(check, 2)[0] == {0, 1}


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_owners_share_the_work(ranks):
    def check():
        _, _, optimizer = sent(Block(1))
        return [(task.owner, task.cost) for task in optimizer._owner_plan.tasks]

    for tasks in run_ranks(check, ranks):
        busy = [sum(work for owner, work in tasks if owner == rank) for rank in range(ranks)]
        most = max(work for _, work in tasks)
        assert max(busy) <= sum(busy) / ranks + most
        assert len(tasks) == 5 + 2 + 2


def test_strips_cut_matrices_in_blocks_of_rows():
    assert block_ranges(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert block_ranges(4, 4) == [range(4)]
    matrices = matrices_in(torch.zeros(3, 5, 2), (5,), "w", "SOAP")
    strips = split_into_strips(matrices, 3)
    assert [strip.name for strip in strips[:3]] == ["w[0][0:3]", "w[0][3:5]", "w[1][0:3]"]
    assert [strip.shape for strip in strips] == [(3, 2), (2, 2)] * 3
    assert [strip.local_slice for strip in strips] == [
        slice(start, stop)
        for first in (0, 10, 20)
        for start, stop in ((first, first + 6), (first + 6, first + 10))
    ]


def test_work_is_that_of_the_blocks():
    """Of 4 x 6 in blocks of 4: 4 x 4 and 4 x 2, a new basis in every second step."""
    products = 4 * 4 * 4 * (4 + 4) + 4 * 4 * 2 * (4 + 2)
    assert soap_cost(4, 2)((4, 6)) == products + 7 * 128 // 6 + 7 * (64 + 8) // 6
    assert soap_cost(4, 1)((4, 6)) > soap_cost(4, 10)((4, 6))
