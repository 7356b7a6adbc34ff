"""Chunks of sequences: each product is computed by one rank, and zig-zag order is balanced."""

import pytest
import torch

from plan_api.context_parallel import SequenceSharding
from plan_api.context_parallel.order import ORDERS, tile_between, tiles_over_all

LENGTH = 24
RANKS = (1, 2, 3, 4)


def count_products(order, rank, causal):
    """Counts the (query, key) products of a rank, by tiles of blocks and by tiles over all keys."""
    positions = order.positions(LENGTH).view(order.ranks, -1)
    own, each = positions[rank], LENGTH // order.ranks
    by_block, over_all = torch.zeros(2, LENGTH, LENGTH, dtype=torch.int)
    for source in range(order.ranks):
        tile = tile_between(order, rank, source, each, each, causal)
        if tile is not None:
            add(by_block, tile, own, positions[source])
    for tile in tiles_over_all(order, rank, each, LENGTH, causal):
        add(over_all, tile, own, torch.arange(LENGTH))
    return by_block, over_all


def add(counts, tile, own, keys):
    queries, keys = own[tile.queries], keys[tile.keys]
    computed = torch.ones(len(queries), len(keys), dtype=torch.int)
    computed = computed.tril() if tile.causal else computed
    assert tile.products == computed.sum()
    counts[queries[:, None], keys[None, :]] += computed


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", RANKS)
def test_each_product_is_computed_exactly_once(ranks, name, causal):
    order, ones = SequenceSharding(name, ranks), torch.ones(LENGTH, LENGTH, dtype=torch.int)
    by_rank = [count_products(order, rank, causal) for rank in range(ranks)]
    for counts in zip(*by_rank, strict=True):
        assert torch.equal(sum(counts), ones.tril() if causal else ones)


def work(name, ranks):
    """Returns the number of products of each rank, in causal attention."""
    order, each = SequenceSharding(name, ranks), LENGTH
    return [
        sum(tile.products for tile in tiles_over_all(order, rank, each, each * ranks, True))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_gives_all_ranks_the_same_work(ranks):
    assert len(set(work("zigzag", ranks))) == 1


def test_contiguous_gives_the_last_rank_most():
    """On 4 ranks a little more than 7/16, as the diagonal counts."""
    by_rank = work("contiguous", 4)
    assert by_rank == sorted(by_rank)
    assert by_rank[-1] / sum(by_rank) == pytest.approx(7 / 16, abs=0.01)


def test_zigzag_pairs_an_early_chunk_with_a_late_one():
    assert SequenceSharding("zigzag", 2).positions(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert SequenceSharding("contiguous", 2).positions(8).tolist() == list(range(8))


@pytest.mark.parametrize(("name", "chunks", "length"), [("zigzag", 4, 6), ("contiguous", 2, 5)])
def test_an_uneven_length_is_refused(name, chunks, length):
    order = SequenceSharding(name, 2)
    order.check_length(4 * chunks, "x")
    with pytest.raises(ValueError, match=rf"x: expected .* multiple of {chunks},.* got {length}"):
        order.check_length(length, "x")
